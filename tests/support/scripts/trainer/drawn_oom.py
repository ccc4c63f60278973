"""Runs out of memory once, on one rank, at a drawn place of a pass; writes the outcome as JSON.

`drawn_oom.py FOLDER CASE`. Two shapes of windows alternate. The ranks do not vote within the passes
of the window that runs out of memory. Its place is a number of an allocation or of a collective
within one forward or backward. A real failure is one of the allocator: all memory that a limit on
addresses leaves is taken, and the limit stays low until all ranks have left the window. Weights and
losses are compared with those of a run with the same sizes from the start. Rank r writes
FOLDER/rank-r.json; a rank that runs out of memory for good ends with the error, as a script does.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import logging
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.comm import comm as deepspeed_comm
from recovery_cases import BF16, CONFIG, ON_HOST, WANTED, allocator_error, zero
from recovery_matrix import QUIET, full_weights
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import zerowatch
from zerowatch.runtime.collectives.collective_table import Guard, guarded_methods
from zerowatch.runtime.common.patching import PatchSet

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

WIDTH = 128
SHAPES = ((9, 112), (7, 64))  # samples of a rank and length, of even and of odd windows
AFTER = 1  # windows after the one that ran out of memory
TRIES = 3
COUNTED_BYTES = 2**14  # smaller allocations are not counted
ROOM_BYTES = 48 * 2**10  # that a real failure leaves: for objects of Python, and for messages
PIECES = (2**20, 2**17, 2**14)  # sizes of the allocations that take the other memory
ARENAS = 16  # of glibc's malloc: so many failures in turn show that all are full
M_ARENA_MAX = -8  # its name in glibc's malloc.h
ENDED = 3  # exit code after an error of train_batch

# Buckets are small, so that a pass has many collectives, and a parameter may fill one alone.
SMALL_3 = {
    "reduce_bucket_size": 30_000,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 0,
}
EAGER_3 = {
    "reduce_bucket_size": 90_000,
    "stage3_prefetch_bucket_size": 200_000,
    "stage3_param_persistence_threshold": 200,
    "stage3_max_reuse_distance": 0,
}
SMALL_2 = {"reduce_bucket_size": 30_000}
ENGINES = {
    "stage 0": zero(0),
    "stage 1": zero(1),
    "stage 2, small buckets": zero(2, **SMALL_2),
    "stage 2, small buckets per owner": zero(2, use_multi_rank_bucket_allreduce=False, **SMALL_2),
    "stage 2, overlapping": zero(2, overlap_comm=True, **SMALL_2),
    "stage 2, optimizer on host": zero(2, offload_optimizer=ON_HOST, **SMALL_2),
    "stage 3, small buckets": zero(3, **SMALL_3),
    "stage 3, eager prefetching": zero(3, **EAGER_3),
    "stage 3, overlapping": zero(3, overlap_comm=True, **EAGER_3),
    "stage 3, all-reduce": zero(3, reduce_scatter=False, **SMALL_3),
    "stage 3, bf16": {**zero(3, **EAGER_3), **BF16},
    "stage 3, all on host": zero(3, offload_optimizer=ON_HOST, offload_param=ON_HOST, **EAGER_3),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One drawn failure.

    Attributes:
        engine: Name of the engine's options.
        rank: Where memory runs out.
        window: The window; its parity is its shape.
        place: The pass. The loss belongs to the forward.
        micro_batch: Position of the micro-batch in the window.
        by: What is counted within the pass.
        moment: Relative to the collective; "after" for an allocation.
        at: Number that is counted to, as part of the number in an earlier window of this shape.
        is_real: Whether the allocator fails, under a limit; else an error is raised.
        passes: Whether the middle block runs in all windows ("equal"), in those of the second shape
            ("alternating"), or for the first time in the window that runs out of memory ("new").
    """

    engine: str
    rank: int
    window: int
    place: Literal["forward", "backward"]
    micro_batch: Literal["first", "middle", "last"]
    by: Literal["allocation", "collective"]
    moment: Literal["before", "within", "after"]
    at: float
    is_real: bool
    passes: Literal["equal", "alternating", "new"]

    def has_middle(self, window: int) -> bool:
        """Return whether the middle block runs in a window."""
        if self.passes == "alternating":
            return window % 2 == 1
        return self.passes == "equal" or window >= self.window


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.inner = torch.nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.drop = torch.nn.Dropout(0.2)  # shows whether a generator is not restored
        self.outer = torch.nn.Linear(3 * WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.inner(self.norm(x)))
        return x + self.outer(self.drop(hidden))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(3)])
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, has_middle: bool) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number != 1 or has_middle:
                x = block(x)
        return self.head(x).mean(1).squeeze(-1)


class Shortage:
    """Takes the memory of this process until `end`, but for `ROOM_BYTES`."""

    def __init__(self) -> None:
        self._before: tuple[int, int] | None = None
        self._taken: list[torch.Tensor] = []

    @property
    def is_on(self) -> bool:
        return self._before is not None

    def begin(self) -> None:
        """Lower the limit to what is mapped, and take what is left in the allocator."""
        room = _taken(ROOM_BYTES)
        before = self._before = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), before[1]))
        self.take()
        del room

    def take(self) -> None:
        """Take what is free."""
        for size in PIECES:
            failures = 0
            while failures < ARENAS:
                try:
                    self._taken.append(_taken(size))
                    failures = 0
                except RuntimeError:
                    failures += 1

    def end(self) -> None:
        """Lift the limit. Safe to call twice."""
        before, self._before = self._before, None
        if before is not None:
            resource.setrlimit(resource.RLIMIT_AS, before)
        self._taken.clear()


def _taken_or_none(size: int) -> torch.Tensor | None:
    with suppress(RuntimeError):
        return _taken(size)
    return None


def _taken(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")


class Trigger:
    """Counts the allocations and collectives of each pass, and fails at the case's place.

    Attributes:
        window: Number of the window; set it before each.
        tries: Windows in which memory was short.
        has_failed: Whether an operation has failed; what it has freed then stays free.
        struck_at: Time of the last failure, in seconds of the monotonic clock; None before.
        struck_in: Where the failure was, for the report.
        on_strike: Function to call before memory becomes short.
    """

    def __init__(self, case: Case, *, is_active: bool) -> None:
        self.case, self.is_active, self.shortage = case, is_active, Shortage()
        self.window = self.tries = 0
        self.has_failed = False
        self.struck_at: float | None = None
        self.struck_in = ""
        self.on_strike: Callable[[], None] = lambda: None
        self._counts: dict[tuple[int, str, int], Counter[str]] = {}  # by shape and pass
        self._pass: tuple[str, int] | None = None
        self._seen: Counter[str] = Counter()
        self._target: int | None = None
        self._by: str = case.by

    def begin_pass(self, place: str, micro_batch: int, num_micro_batches: int) -> None:
        self.end_pass()
        self._pass, self._seen, self._target = (place, micro_batch), Counter(), None
        case = self.case
        number = {"first": 0, "middle": num_micro_batches // 2, "last": num_micro_batches - 1}
        is_due = self.window >= case.window and (self.window - case.window) % 2 == 0
        if not self.is_active or self.struck_at is not None or not is_due or self.tries >= TRIES:
            return
        if (place, micro_batch) == (case.place, number[case.micro_batch]):
            # Where memory was short, but nothing failed to the end of the pass: earlier, and at
            # last from the start of the pass.
            self.tries += 1
            self._by = case.by if self.tries < TRIES else "allocation"
            count = self._counts[self.window % 2, place, micro_batch][self._by]
            self._target = int(case.at / 2 ** (self.tries - 1) * count)
            self._target *= self.tries < TRIES

    def end_pass(self) -> None:
        """Keep the counts; memory that was short has sufficed for the rest of the pass."""
        if self._pass is not None:
            self._counts[(self.window % 2, *self._pass)] = self._seen
            self._pass, self._seen, self._target = None, Counter(), None  # not in the update
        if self.shortage.is_on:
            self.shortage.end()
            self.struck_at = None

    def abandon_pass(self) -> None:
        """Forget the counts of a pass that has failed."""
        self._pass = self._target = None

    def on_operation(self) -> None:
        """Take what the last operation has freed, until an allocation fails."""
        if self.shortage.is_on and not self.has_failed:
            room = _taken_or_none(ROOM_BYTES)
            self.shortage.take()
            del room

    def on_allocation(self) -> None:
        self._seen["allocation"] += 1
        if self._by == "allocation" and self._seen["allocation"] > (self._target_or_never()):
            self._strike(f"allocation {self._seen['allocation']}")

    def on_collective(self, name: str, moment: str) -> None:
        self._seen["collective"] += moment == "before"
        is_due = self._seen["collective"] > self._target_or_never()
        if self._by == "collective" and moment == self.case.moment and is_due:
            self._strike(f"{moment} collective {self._seen['collective']}, {name}")

    def _target_or_never(self) -> float:
        return float("inf") if self._target is None else self._target

    def _strike(self, where: str) -> None:
        self._target, self.struck_in = None, where
        self.struck_at = time.monotonic()
        self.on_strike()
        if self.case.is_real:
            self.shortage.begin()
            return
        raise allocator_error(1)


class CountedAllocations(TorchDispatchMode):
    """Calls the trigger after each operation that has allocated a tensor."""

    def __init__(self, trigger: Trigger) -> None:
        super().__init__()
        self.trigger = trigger

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.trigger.on_operation()
        try:
            result = func(*args, **(kwargs or {}))
        except Exception:
            self.trigger.has_failed = True
            raise
        given = {_pointer(each) for each in tree_iter((args, kwargs)) if _is_counted(each)}
        if any(_is_counted(each) and _pointer(each) not in given for each in tree_iter(result)):
            self.trigger.on_allocation()
        return result


def _is_counted(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.nbytes >= COUNTED_BYTES


def _pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Trained:
    """A run over many windows, in which the trigger sees each pass and each collective."""

    def __init__(self, case: Case, *, is_failing: bool) -> None:
        self.case = case
        self.trigger = Trigger(case, is_active=is_failing)
        torch.manual_seed(0)
        model = Net()
        config = {**CONFIG, **ENGINES[case.engine]}
        self.patches = PatchSet()
        self._patch_collectives("within")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.run = zerowatch.TrainingRun(
            model, config=config, optimizer=optimizer, loss=self.loss, settings=QUIET
        )
        self._patch_collectives("outside")
        self.patches.add(self.run.engine, "backward", self._backward)
        self.left_at: float | None = None
        self.run.on_window_abort(self.leave_window)
        self.guard, self.replay = self.run._window_runner._guard, self.run._window_runner.replay
        self.num_passes = self.num_micro_batches = self.window = 0
        self.was_guarded: bool | None = None  # in the first attempt of the window
        self.losses: list[float] = []

    def loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.was_guarded is None:
            self.was_guarded = self.guard.armed
        self.trigger.begin_pass("forward", self.num_passes, self.num_micro_batches)
        x = batch["x"].to(next(model.parameters()).dtype)
        predicted = model(x, self.case.has_middle(self.window)).float()
        return (predicted - batch["y"]).square().mean()

    def leave_window(self) -> None:
        """All ranks have left the window: the memory is there again."""
        self.trigger.shortage.end()
        self.trigger.abandon_pass()
        self.left_at = self.left_at or time.monotonic()
        self.num_passes = 0

    def train(self, window: int) -> Any:
        samples, _ = SHAPES[window % 2]
        self.num_passes, self.window, self.was_guarded = 0, window, None
        self.num_micro_batches = -(-samples // WANTED)
        self.trigger.window = window
        torch.manual_seed(1000 * window + dist.get_rank())
        try:
            with CountedAllocations(self.trigger) if self.trigger.is_active else nullcontext():
                result = self.run.train_batch(batch_of(window))
        finally:
            self.trigger.shortage.end()
        self.losses.append(result.loss)
        return result

    def close(self) -> torch.Tensor:
        """Return the weights."""
        self.patches.restore()
        weights = full_weights(self.run.engine)
        self.run.close()
        self.run.engine.destroy()
        deepspeed.runtime.zero.parameter_offload.FWD_MODULE_STACK.clear()
        return weights

    def _patch_collectives(self, position: str) -> None:
        for name in guarded_methods(Guard.OOM):
            self.patches.add_existing(
                deepspeed_comm.cdb, [name], partial(self._collective, name, position)
            )

    def _collective(
        self, name: str, position: str, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        trigger = self.trigger

        def call(*args: Any, **kwargs: Any) -> Any:
            if position == "within":
                trigger.on_collective(name, "within")
                return original(*args, **kwargs)
            trigger.on_collective(name, "before")
            result = original(*args, **kwargs)
            trigger.on_collective(name, "after")
            return result

        return call

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            self.trigger.begin_pass("backward", self.num_passes, self.num_micro_batches)
            result = original(*args, **kwargs)
            self.trigger.end_pass()
            self.num_passes += 1
            return result

        return backward


def batch_of(window: int) -> dict[str, torch.Tensor]:
    """Return this rank's share."""
    samples, length = SHAPES[window % 2]
    generator = torch.Generator().manual_seed(window * dist.get_world_size() + dist.get_rank())
    return {
        "x": torch.randn(samples, length, WIDTH, generator=generator),
        "y": torch.randn(samples, generator=generator),
    }


def run_case(case: Case, write: Callable[[dict[str, Any]], None]) -> None:
    """Run the case and its comparison; raise the error that ends the run."""
    trained = Trained(case, is_failing=dist.get_rank() == case.rank)
    reasons: list[str] = []
    unfinished_reason = trained.guard.unfinished_reason

    def keep_reason() -> str:
        reasons.append(unfinished_reason())
        return reasons[-1]

    errors: list[str] = []

    def keep_error(error: BaseException) -> None:
        trained.trigger.has_failed = True
        errors.append(type(error).__name__)

    trained.guard.unfinished_reason = keep_reason
    trained.replay.on_error.append(keep_error)
    found: dict[str, Any] = {"replays": 0, "was guarded": False}
    sizes: list[int] = []
    trained.trigger.on_strike = lambda: write(_report(trained, reasons, errors))
    window, last = 0, case.window + 2 * (TRIES - 1)
    while window <= last:
        try:
            result = trained.train(window)
        except BaseException as error:
            raised = f"{type(error).__name__}: {error}"
            found |= _report(trained, reasons, errors) | {"ended": raised, "window": window}
            write(found | {"left at": time.monotonic(), "was guarded": trained.was_guarded})
            raise
        sizes.append(max(result.micro_batches))
        if result.replays and not found["replays"]:
            found |= {"replays": result.replays, "was guarded": trained.was_guarded}
            last = window + AFTER
        window += 1
    found |= _report(trained, reasons, errors) | {"left at": trained.left_at}
    losses, weights = trained.losses, trained.close()
    expected = Trained(case, is_failing=False)
    expected.guard.close()  # votes change nothing here, and take time
    for number, size in enumerate(sizes):
        expected.run.set_micro_batch(size)
        expected.train(number)
    found["same losses"] = losses == expected.losses
    found["same weights"] = torch.equal(weights, expected.close())
    write(found)


def _report(trained: Trained, reasons: list[str], errors: list[str]) -> dict[str, Any]:
    trigger = trained.trigger
    return {
        "reasons": reasons,
        "errors": errors,
        "struck at": trigger.struck_at,
        "struck in": trigger.struck_in,
        "tries": trigger.tries,
    }


def main(folder: Path, case: Case) -> None:
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    faulthandler.enable()
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    gc.freeze()

    def write(found: dict[str, Any]) -> None:
        file = folder / f"rank-{dist.get_rank()}.json"
        file.with_suffix(".part").write_text(json.dumps(found))
        file.with_suffix(".part").rename(file)

    try:
        run_case(case, write)
    except Exception:
        logging.exception("the run has ended")
        sys.stderr.flush()
        sys.exit(ENDED)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Case(**json.loads(sys.argv[2])))
