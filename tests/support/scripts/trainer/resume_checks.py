"""Saves and loads runs of many engines; writes the outcomes as JSON per rank.

`resume_checks.py FOLDER NAME...`, of engines. Each is trained to the end and saved half-way. Then a
new run, of other weights, loads the checkpoint and trains on, and so does the run that was saved.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload
from torch.utils.data import IterableDataset

import zerowatch
from zerowatch.errors import CheckpointError
from zerowatch.runtime.trainer.checkpoint import snapshot
from zerowatch.runtime.trainer.checkpoint.host_copy import host_copy, host_copy_bytes

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

# Saved at step 3: DeepSpeed's Adam on CPU raises the powers of beta after a load, and multiplies
# them from step to step. At step 4 both give the same bits; not so at each step.
STEPS, SAMPLES, WIDTH = 6, 4, 9
QUIET = {
    "serve": {"enabled": False},
    "run_log": {"enabled": False},
    "cross_rank": {"enabled": False},
}
FLOAT16 = {"enabled": True, "dtype": "float16"}
ENGINES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)},
    "stage 1, int8": {"zero_optimization": {"stage": 1}},
    "stage 3, nothing kept": {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    },
    "stage 2, offload": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    },
    "stage 3, offload": {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
    },
    "bf16, stage 0": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}},
    "bf16, stage 2": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}},
    "float16 autocast, int8": {"torch_autocast": FLOAT16},
    **{
        f"float16 autocast, stage {stage}": {
            "torch_autocast": FLOAT16,
            "zero_optimization": {"stage": stage},
        }
        for stage in (1, 2, 3)
    },
    # Of the same bits at any step after a load.
    "torch's Adam": {"optimizer": {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}}},
    "BF16_Optimizer": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
}


class Net(torch.nn.Module):
    """With dropout, so that generators that are not restored show in the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.dropout = torch.nn.Dropout(0.3)
        self.head = torch.nn.Linear(2 * WIDTH + 1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(torch.tanh(self.body(x)))).squeeze(-1)


class Batches:
    """This rank's share of one global batch after the other; the caller's own position is saved."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def take(self) -> dict[str, torch.Tensor]:
        seed = 100 * self.position + dist.get_rank()
        self.position += 1
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(SAMPLES, WIDTH, generator=generator)
        return {"x": x, "y": x.sum(dim=1)}


class NoisyStream(IterableDataset[dict[str, torch.Tensor]]):
    """Stream without a state, whose samples have noise from the generator of dropout."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(SAMPLES * (STEPS - 1)):  # the last step is in the second pass
            x = torch.full((WIDTH,), 0.1 * number) + torch.randn(WIDTH)
            yield {"x": x, "y": x.sum()}


def loss(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    x = batch["x"].to(next(model.parameters()).dtype)
    return ((model(x).float() - batch["y"]) ** 2).mean(), 3 * len(x)


def new_run(
    name: str, seed: int, clip: float = 0.5, **settings: dict[str, Any]
) -> zerowatch.TrainingRun:
    torch.manual_seed(seed)
    return zerowatch.TrainingRun(
        Net(),
        config={
            "train_micro_batch_size_per_gpu": 3,
            "gradient_clipping": clip,
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
            **ENGINES[name],
        },
        loss=loss,
        settings=QUIET | settings,
        compression="int8" if "int8" in name else None,
    )


def end(run: zerowatch.TrainingRun) -> None:
    run.close()
    run.engine.destroy()
    parameter_offload.FWD_MODULE_STACK.clear()


def train(run: zerowatch.TrainingRun, batches: Batches, until: int) -> list[float]:
    losses = []
    while run.steps < until:
        losses.append(run.train_batch(batches.take()).loss)
    return losses


def outcome(run: zerowatch.TrainingRun, losses: list[float]) -> dict[str, Any]:
    """Return what must be the same: every bit of weights and losses, and all counts."""
    with deepspeed.zero.GatheredParameters(list(run.module.parameters())):
        weights = torch.cat([each.detach().double().flatten() for each in run.module.parameters()])
    engine = run.engine
    counts = [run.steps, run.samples, engine.global_steps, engine.global_samples]
    return {
        "weights": weights.tolist(),
        "losses": losses,
        "counts": counts,
        "skipped": engine.skipped_steps,
        "rate": engine.get_lr(),
        "drawn": torch.rand(1).item(),
    }


def resume(run: zerowatch.TrainingRun, saves: Path) -> dict[str, Any]:
    """Load the checkpoint and train to the end."""
    run.load(saves)
    return outcome(run, train(run, Batches(run.client_state), STEPS))


def check(name: str, folder: Path) -> dict[str, Any]:
    """Return the outcome of a run that was never interrupted, and of two that were."""
    saves = folder / name.replace(" ", "-")
    run, batches = new_run(name, seed=0), Batches()
    begun = [run.load(saves), run.steps]
    train(run, batches, STEPS // 2)
    path = run.save(saves, client_state=batches.position)
    copied = saves.with_name(f"{saves.name}-background")
    with copies() as states:
        run.save(copied, client_state=batches.position, background=True)
    found = {"saved": path.name, "begun": begun, "copied": bytes_of(states)}
    found["through"] = outcome(run, train(run, batches, STEPS))
    run.wait_for_save()
    found["same files"] = content(saves) == content(copied)
    found["background"] = resume(run, copied)
    found["same engine"] = resume(run, saves)
    end(run)
    run = new_run(name, seed=1)
    found["new engine"] = resume(run, saves)
    end(run)
    return found


@contextmanager
def copies() -> Iterator[list[tuple[Any, Any]]]:
    """Record the states that are copied to host memory, and their copies."""
    states: list[tuple[Any, Any]] = []

    def recorded(state: Any) -> Any:
        states.append((state, host_copy(state)))
        return states[-1][1]

    with mock.patch.object(snapshot, "host_copy", recorded):
        yield states


def bytes_of(states: list[tuple[Any, Any]]) -> dict[str, int]:
    """Return the bytes that were counted and copied, and how many copies have a gradient."""
    copied = [list(tensors_in(copy)) for _, copy in states]
    return {
        "counted": sum(host_copy_bytes(state) for state, _ in states),
        "copied": sum(
            sum({each.data_ptr(): each.nbytes() for each in map(storage_of, tensors)}.values())
            for tensors in copied
        ),
        "gradients": sum(each.is_leaf and each.grad is not None for each in chain(*copied)),
        "elsewhere": sum(each.device.type != "cpu" for each in chain(*copied)),
    }


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def tensors_in(node: Any) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, dict | list | tuple):
        for child in node.values() if isinstance(node, dict) else node:
            yield from tensors_in(child)


def content(saves: Path) -> dict[str, bytes]:
    """Return the files of the only checkpoint in a folder."""
    (checkpoint,) = saves.glob("step-*")
    paths = [path for path in checkpoint.rglob("*") if path.is_file()]
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in paths}


def rebuilt(folder: Path) -> dict[str, Any]:
    """Return the outcomes for a run that was rebuilt before it was saved, and after it was.

    Its plan file is of the step of the save, but from before the second rebuild.
    """
    saves, earlier = folder / "rebuilt", folder / "before the rebuild"
    run_log = {"folder": str(folder / "runs")}
    run, batches = new_run("stage 1", seed=0, run_log=run_log), Batches()
    train(run, batches, 1)
    run.save(earlier, client_state=batches.position)
    run.rebuild({"zero_optimization": {"stage": 3}})
    train(run, batches, STEPS // 2 - 1)
    run.set_micro_batch(2)
    train(run, batches, STEPS // 2)
    run.rebuild({"gradient_clipping": 0.25})
    plan = (run.watch.run_folder / "plan.json").read_text()
    run.save(saves, client_state=batches.position)
    found: dict[str, Any] = {"through": outcome(run, train(run, batches, STEPS))}
    found["plan"] = [json.loads(plan)[name] for name in ("steps", "config_changes")]
    end(run)
    run = new_run("stage 1", seed=1, run_log=run_log)
    if dist.get_rank() == 0:  # as if the first run had ended after its save
        (run.watch.run_folder / "plan.json").write_text(plan)
    dist.barrier()
    found["new engine"] = resume(run, saves)
    found["stage"] = run.engine.zero_optimization_stage()
    found["clip"] = run.engine.gradient_clipping()
    run.load(earlier)
    found["earlier"] = [run.steps, run.engine.zero_optimization_stage()]
    train(run, Batches(run.client_state), 2)
    end(run)
    return found


def streamed(folder: Path, *ends: int) -> dict[str, Any]:
    """Return the outcome of a run on a stream that is saved and loaded at all ends but the last."""
    saves = folder / f"stream-{len(ends)}"
    losses: list[float] = []
    for until in ends:
        run = new_run("torch's Adam", seed=len(losses))
        batches = run.loader(NoisyStream(), batch_samples=SAMPLES * dist.get_world_size()).forever()
        run.load(saves)
        losses += [run.train_batch(next(batches)).loss for _ in range(until - run.steps)]
        run.save(saves)
        found = outcome(run, losses)
        end(run)
    return found


def refusals(folder: Path) -> dict[str, str]:
    """Return the errors of another engine, another clipping and a full disk."""
    saves = folder / "refusals"
    run, batches = new_run("stage 1", seed=0), Batches()
    train(run, batches, 1)
    run.save(saves)
    train(run, batches, 2)
    found = {"object": error_of(run.save, saves, client_state=object)}
    with full_disk_on_rank(1):
        found["full disk"] = error_of(run.save, saves)
        run.save(saves, background=True)
        found["full disk, background"] = error_of(run.wait_for_save)
    found["left"] = " ".join(sorted(path.name for path in saves.iterdir() if path.is_dir()))
    found |= saves_after_a_failure(run, folder / "after a failure")
    end(run)
    run = new_run("stage 2", seed=0)
    found["stage"] = error_of(run.load, saves)
    end(run)
    run = new_run("stage 1", seed=0, clip=0.25)
    run.load(saves)
    found["clip"], found["step"] = str(run.engine.optimizer.clip_grad), str(run.steps)
    if dist.get_rank() == 1:
        damaged = saves / "step-00000001" / "zerowatch-rank-00001.pt"
        damaged.write_bytes(b"\0" * damaged.stat().st_size)
    dist.barrier()
    found["damaged"] = error_of(run.load, saves)
    end(run)
    return found


def saves_after_a_failure(run: zerowatch.TrainingRun, saves: Path) -> dict[str, str]:
    """Return what a save does after one on a thread that failed, and without a thread on rank 1."""
    with full_disk_on_rank(1):
        run.save(saves, background=True)
        for thread in threading.enumerate():
            if thread.name == "zerowatch-save":
                thread.join()
    found = {"save after a failure": error_of(run.save, saves)}
    found["saved after a failure"] = " ".join(path.name for path in saves.glob("step-*"))
    if dist.get_rank() == 1:
        with mock.patch.object(threading.Thread, "start", _raise_no_thread):
            path = run.save(saves, background=True)
    else:
        path = run.save(saves, background=True)
    found["saved without a thread"] = path.name * path.is_dir()
    return found


def _raise_no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def failed_loads(name: str, folder: Path) -> dict[str, Any]:
    """Return errors and steps of loads that fail on rank 1 only, and of the loads after them."""
    saves, is_failing = folder / f"failed-{name}", dist.get_rank() == 1
    run, batches = new_run(name, seed=0), Batches()
    for step in (1, 2):
        train(run, batches, step)
        newest = run.save(saves, client_state=step)
    found = {}
    with unreadable_files(run.engine) if is_failing else nullcontext():
        found["unreadable"] = error_of(run.load, saves)
    if is_failing:
        file = next(newest.glob("*rank_1*optim_states.pt"))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 255
        file.write_bytes(data)
    dist.barrier()
    found["damaged"] = error_of(run.load, saves)
    found["older"] = [run.load(saves, fallback=True), run.client_state, run.steps]
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "2"  # as `zerowatch run --max-restarts 2` sets it
    found["restartable"] = run.load(saves)
    del os.environ["TORCHELASTIC_MAX_RESTARTS"]
    found["not allowed"] = error_of(run.load, saves, fallback=is_failing)
    train(run, batches, STEPS)
    found["trained"] = run.steps
    run.save(saves)
    dist.barrier()
    found["left"] = sorted(path.name for path in saves.glob("step-*"))
    end(run)
    return found


@contextmanager
def unreadable_files(engine: Any) -> Iterator[None]:
    """Let no file be read by this engine."""
    engine.checkpoint_engine.load = _raise_os_error
    try:
        yield
    finally:
        del engine.checkpoint_engine.load


def _raise_os_error(*args: Any, **kwargs: Any) -> Any:
    raise OSError("stale file handle")


def error_of(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except CheckpointError as error:
        return str(error)
    return ""


@contextmanager
def full_disk_on_rank(rank: int) -> Iterator[None]:
    """Let a rank write no file of more than a few bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    torch.set_num_threads(1)
    found = {name: check(name, target) for name in sys.argv[2:]}
    found["rebuilt"], found["refusals"] = rebuilt(target), refusals(target)
    found["streams"] = [streamed(target, STEPS), streamed(target, 1, 3, 4, STEPS)]
    found["failed loads"] = [failed_loads(name, target) for name in ("stage 2", "stage 3")]
    (target / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
