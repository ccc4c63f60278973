"""One rank of the bench of the training thread: steps of fixed work, with and without monitoring.

The work is a real engine with small layers. Between its parts it sweeps over memory, so that hooks
and collectives find caches that a model's arithmetic has filled, and multiplies matrices that stay
in a core's own caches, which the neighbours of a virtual machine disturb least.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from bench import gpt_training
from bench.monitoring_cost import gil_holds
from bench.monitoring_cost.own_threads import cpu_seconds, own_threads
from bench.monitoring_cost.step_overhead_job import orders
from bench.monitoring_cost.thread_cost_job import by_metric
from torch.utils.data import DataLoader, IterableDataset

from zerowatch.metrics.catalog.communication import COLLECTIVE_CALLS
from zerowatch.metrics.catalog.training import STEPS
from zerowatch.runtime.common.device_scalar import scalar
from zerowatch.runtime.common.patching import AttributePatch
from zerowatch.runtime.entry_points import watch

SETTINGS: dict[str, Any] = {"serve": {"port": 0}, "run_log": {"folder": "runs"}}
OFF, OFF_AGAIN, WATCHED = ARMS = ["off", "off again", "watched"]
READS = "reads alone"
# As many reductions, gathers and updates a step as the GPT of gpt_training.py has.
WIDTH, LAYERS, ROWS = 64, 5, 8
# A part of the work sweeps this much: four times a core's second-level cache of 0.5 MiB. By turns
# on a busy machine (load 8), zerowatch's clocks of hooks and collectives took 535 and 565 us a
# step in the GPT of 50 ms, 610 and 495 in these steps of 50 ms, 460 and 420 in the short ones.
# Sweeps of 4 MiB changed this little.
SWEEP_BYTES = 2 * 2**20
# The parts of a step take turns in this much, which is twice a third-level cache of 32 MiB.
SWEPT_BYTES = 64 * 2**20
MATRIX_WIDTH = 128


def main() -> None:
    asked = gpt_training.arguments()
    pin(int(os.environ["RANK"]))
    job = FixedSteps()
    pin(int(os.environ["RANK"]))  # the threads that have been started since, too
    gc.collect()
    gc.freeze()  # else a rare full collection, which visits all modules, hits one block
    if "other_core" in asked:
        job.aim_at(asked["step_seconds"])
        gpt_training.report(opened_rounds(job, asked["other_core"], own_core=1))
        return
    short = switched_rounds(job, asked["short"])
    job.aim_at(asked["step_seconds"])
    found = {
        "short": short,
        "long": opened_rounds(job, asked["long"]),
    }
    num_steps, paced_steps = asked["sampled_steps"], asked["paced_steps"]
    separate = SETTINGS | {"process": {"separate": True}}
    with watched(job, SETTINGS, num_steps // 20):
        found["holds"] = holds_of_own_threads(job, num_steps)
    with watched(job, separate, num_steps // 20):
        found["separate"] = {
            "threads": cpu_of_own_threads(job, num_steps),
            "holds": holds_of_own_threads(job, num_steps),
        }
    job.aim_at(asked["paced_seconds"])
    with watched(job, SETTINGS, paced_steps // 20):
        found["paced"] = cpu_of_own_threads(job, paced_steps)
    with watched(job, separate, paced_steps // 20):
        found["separate"]["paced"] = cpu_of_own_threads(job, paced_steps)
    gpt_training.report(found)


def pin(core: int, threads: Iterable[int] | None = None) -> None:
    """Pin threads to a core, by default all of this process; a new thread inherits it."""
    cores = sorted(os.sched_getaffinity(os.getppid()))
    for thread in map(int, os.listdir("/proc/self/task")) if threads is None else threads:
        os.sched_setaffinity(thread, {cores[core % len(cores)]})


class Rows(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        batch = torch.ones(ROWS, WIDTH)
        while True:
            yield batch


class Layers(torch.nn.Module):
    """Layers that call `before_layer` before each forward and each backward pass of a layer."""

    def __init__(self, before_layer: Callable[[], None]) -> None:
        super().__init__()
        self._before_layer = before_layer
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            self._before_layer()
            x = layer(x)
            x.register_hook(lambda _: self._before_layer())
        return x.square().mean()


class FixedSteps:
    """An engine whose steps all do the same work; `num_products` makes them longer."""

    def __init__(self, sweep_bytes: int = SWEEP_BYTES) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        gpt_training.meet()
        self.num_products = 0
        self._swept = torch.zeros(SWEPT_BYTES // 4).split(sweep_bytes // 4)
        self._next_sweep = 0
        self._factor = torch.zeros(MATRIX_WIDTH, MATRIX_WIDTH)
        self._product = torch.zeros(MATRIX_WIDTH, MATRIX_WIDTH)
        model = Layers(self._work)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        optimizer.register_step_pre_hook(lambda *_: self._work())
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config())
        self._batches = iter(DataLoader(Rows(), batch_size=None))

    def _work(self) -> None:
        self._swept[self._next_sweep].add_(1.0)
        self._next_sweep = (self._next_sweep + 1) % len(self._swept)
        for _ in range(self.num_products):
            torch.mm(self._factor, self._factor, out=self._product)

    def step(self) -> None:
        batch = next(self._batches)
        self._work()
        loss = self.engine(batch)
        self._work()
        self.engine.backward(loss)
        self._work()
        self.engine.step()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def aim_at(self, seconds: float) -> None:
        """Choose `num_products` so that a step takes about `seconds`; the same on all ranks."""
        for _ in range(3):
            few, many = self._step_seconds(0), self._step_seconds(100)
            number = torch.tensor(100 * (seconds - few) / (many - few))
            torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MIN)
        self.num_products = max(0, round(number.item()))

    def _step_seconds(self, num_products: int) -> float:
        self.num_products = num_products
        measured = []
        for _ in range(7):
            begin = time.perf_counter()
            self.step()
            measured.append(time.perf_counter() - begin)
        return statistics.median(measured)


def ds_config() -> dict[str, Any]:
    bucket = WIDTH * WIDTH
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
    }


def switched_rounds(job: FixedSteps, asked: dict[str, Any]) -> dict[str, Any]:
    """Return rounds of blocks of a few steps, between which only the hooks are switched.

    The threads of monitoring are there in all blocks.
    """
    rounds, clocks = [], []
    orders_of_rounds = list(orders(asked["rounds"], [*ARMS, READS], []))
    reads = Reads(job.engine)
    for part in range(asked["watches"]):
        opened = watch(job.engine, SETTINGS)
        hooks = HookSwitch()
        job.run(asked["first_steps"])
        before = own_clocks(opened)
        for order in orders_of_rounds[part :: asked["watches"]]:
            each = {}
            for arm in order:
                hooks.switch(on=arm == WATCHED)
                with reads.installed() if arm == READS else nullcontext():
                    job.run(asked["settling_steps"])
                    each[arm] = block(job, asked["block_steps"])
            rounds.append(each)
        hooks.switch(on=True)
        opened.close()
        clocks.append(per_step(before, own_clocks(opened)))
    return {"rounds": rounds, "clocks": mean_of(clocks), "block_steps": asked["block_steps"]}


def opened_rounds(
    job: FixedSteps, asked: dict[str, Any], own_core: int | None = None
) -> dict[str, Any]:
    """Return rounds of longer blocks; a watch is opened before each watched one, and closed.

    Its block begins at a random moment of `period_steps`, so that work of a longer period than the
    block is in as many blocks as it should be. Our threads are pinned to `own_core`, if any.
    """
    rounds, clocks, opening_seconds = [], [], []
    picker = random.Random(2)  # the same on all ranks
    for order in orders(asked["rounds"], ARMS, []):
        each = {}
        for arm in order:
            if arm != WATCHED:
                job.run(asked["settling_steps"])
                each[arm] = block(job, asked["block_steps"])
                continue
            begin = time.perf_counter()
            opened = watch(job.engine, SETTINGS)
            opening_seconds.append(time.perf_counter() - begin)
            if own_core is not None:
                pin(own_core, own_threads())
            job.run(asked["first_steps"] + picker.randrange(asked["period_steps"]))
            before = own_clocks(opened)
            each[arm] = block(job, asked["block_steps"])
            opened.close()
            clocks.append(per_step(before, own_clocks(opened)))
        rounds.append(each)
    return {
        "rounds": rounds,
        "clocks": mean_of(clocks),
        "block_steps": asked["block_steps"],
        "open_seconds": statistics.median(opening_seconds),
    }


def block(job: FixedSteps, num_steps: int) -> dict[str, float]:
    """Return a step's seconds, and the CPU seconds of our threads a second.

    `wall` and `training` are wall time and CPU time of this thread. `delay` is the time in which
    this thread waited for its core, less the CPU time of our threads, so others had the core. In
    `waits`, the rest, it did not want the core: it waited for another thread or rank, or the GIL.
    """
    threads = own_threads()
    ours, delay = cpu_of(threads), waited_seconds()
    # The thread's clock, because schedstat of a thread that runs is late by up to a timer tick.
    begin, training = time.perf_counter(), time.thread_time()
    job.run(num_steps)
    training, wall = time.thread_time() - training, time.perf_counter() - begin
    ours, delay = cpu_of(threads) - ours, waited_seconds() - delay
    return {
        "wall": wall / num_steps,
        "training": training / num_steps,
        "delay": (delay - ours) / num_steps,
        "waits": (wall - training - delay) / num_steps,
        "threads": ours / wall,
    }


def waited_seconds() -> float:
    """Return for how long this thread was ready to run and waited for its core."""
    with open("/proc/thread-self/schedstat", encoding="ascii") as file:
        return int(file.read().split()[1]) / 1e9


def cpu_of(threads: dict[int, str]) -> float:
    return sum(cpu_seconds(os.getpid(), each) for each in threads)


class HookSwitch:
    """Takes all wrappers of an open watch out and puts the same ones back, between two steps.

    The two steps after a switch are no part of a block, because they take up to 1 ms longer.
    """

    def __init__(self) -> None:
        self._patches = []
        for patch in gc.get_objects():
            if isinstance(patch, AttributePatch) and (owner := patch._owner()) is not None:
                wrapper = patch._wrapper()
                if wrapper is not None and vars(owner).get(patch.name) is wrapper:
                    self._patches.append((patch, owner, wrapper))
        self._is_on = True

    def switch(self, *, on: bool) -> None:
        if on and not self._is_on:
            for patch, owner, wrapper in self._patches:
                setattr(owner, patch.name, wrapper)
        elif self._is_on and not on:
            for patch, _, _ in self._patches:
                patch.restore()
        self._is_on = on


class Reads:
    """Reads what the record of a step has of torch and DeepSpeed, and does nothing with it.

    Three wrappers in Python are part of it. Collectives are not read.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._forward, self._backward, self._step = engine.forward, engine.backward, engine.step
        self.found: tuple[Any, ...] = ()

    @contextmanager
    def installed(self) -> Iterator[None]:
        replaced = {
            "forward": self._on_forward,
            "backward": self._on_backward,
            "step": self._on_step,
        }
        vars(self._engine).update(replaced)
        try:
            yield
        finally:
            for name in replaced:
                delattr(self._engine, name)

    def _on_forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.found = tuple(batch.shape), batch.dtype
        return self._forward(batch)

    def _on_backward(self, loss: torch.Tensor) -> Any:
        self.found = scalar(loss), torch.is_grad_enabled()
        return self._backward(loss)

    def _on_step(self) -> Any:
        result = self._step()
        engine = self._engine
        self.found = (
            *(engine.global_steps, engine.skipped_steps),
            *(scalar(engine.get_global_grad_norm()), engine.optimizer.param_groups[0]["lr"]),
            *(time.time(), time.perf_counter()),
        )
        return result


def own_clocks(opened: Any) -> dict[str, float]:
    """Return what the watch has counted: steps, collectives, and its seconds by part."""
    values = opened.snapshot().values
    return by_metric(opened) | {
        "steps": sum(values.get(STEPS, {}).values()),
        "calls": sum(values.get(COLLECTIVE_CALLS, {}).values()),
    }


def per_step(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    steps = after["steps"] - before["steps"]
    return {
        name: (after[name] - before[name]) / steps for name in ("hooks", "collectives", "calls")
    }


def mean_of(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.mean(each[name] for each in found) for name in found[0]}


@contextmanager
def watched(job: FixedSteps, settings: dict[str, Any], settling_steps: int) -> Iterator[None]:
    """Open a watch, and train until it and its process have settled; close it at the end."""
    opened = watch(job.engine, settings)
    try:
        assert opened.address is not None  # a process of its own serves by now
        job.run(settling_steps)
        yield
    finally:
        opened.close()


def cpu_of_own_threads(job: FixedSteps, num_steps: int) -> list[float]:
    """Return the CPU seconds of our threads a second, by block."""
    return [block(job, num_steps // 20)["threads"] for _ in range(20)]


def holds_of_own_threads(job: FixedSteps, num_steps: int) -> dict[str, list[float]] | str:
    """Return the CPU seconds of each hold of the GIL by thread, or why they are not known.

    The thread that samples takes time of the core, so this is no part of the other figures.
    """
    if (reason := gil_holds.missing()) is not None:
        return reason
    threads = own_threads()
    with tempfile.TemporaryDirectory() as folder, gil_holds.sampled_holds(Path(folder)) as holds:
        job.run(num_steps)
    return {name: holds.get(thread, []) for thread, name in threads.items()}


if __name__ == "__main__":
    main()
