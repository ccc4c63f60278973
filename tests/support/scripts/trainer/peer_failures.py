"""Trains two ranks whose loss, data or functions fail on one of them; writes what each rank saw.

`peer_failures.py FOLDER`. Rank r writes FOLDER/rank-r.json. The script catches each error and goes
on; the weights must equal those of a run without the failures.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, TensorDataset
from window_checks import QUIET, weights

import zerowatch
from zerowatch.runtime.trainer import run_end

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

WATCHDOG_SECONDS = 600  # also while an op is compiled
WIDTH, SAMPLES = 6, 64
ENGINES = {
    "stage 0": {"stage": 0},
    "stage 2": {"stage": 2, "reduce_bucket_size": 60},
    "stage 3": {
        "stage": 3,
        "reduce_bucket_size": 60,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 0,
    },
}
# Window, and where rank 1 fails in it. The first three windows are guarded.
FAILURES = [
    (1, "before the model"),
    (1, "in the model"),
    (2, "after the model"),
    (2, "in an evaluation"),
    (5, "before the model"),
    (6, "after the model"),
    (6, "in an evaluation"),
]
IN_THE_MODEL_LATER = (7, "in the model")  # not at stage 3, where ranks wait in a gather


def data(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(samples, WIDTH, generator=generator), torch.arange(samples))


class Job:
    """A run on one engine, whose loss fails on rank 1 where `place` says."""

    def __init__(self, zero: dict[str, Any]) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.place, self.micro_batches = "", 0
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 9), torch.nn.Dropout(0.5), torch.nn.Linear(9, 1)
        )
        self.run = zerowatch.TrainingRun(
            self.model,
            config={
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                "zero_optimization": zero,
                "steps_per_print": 10**9,
            },
            loss=self.loss,
            settings=QUIET,
        )
        self.loader = self.run.loader(data(), batch_samples=8)
        self.batches = self.loader.forever()

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        x, _ = batch
        self.micro_batches += 1
        fails = self.place if self.micro_batches == 2 and dist.get_rank() == 1 else ""
        x = x * random.uniform(0.5, 1.5)
        if fails in ("before the model", "in an evaluation"):
            raise ValueError("a bad sample")
        out = model(x[:, :-1] if fails == "in the model" else x)
        if fails == "after the model":
            raise KeyError("labels")
        return out.square().mean()

    def attempt(self, place: str, batch: Any) -> dict[str, Any]:
        """Call train_batch or evaluate with a failure; return what this rank caught."""
        self.place, self.micro_batches = place, 0
        before = (self.run.steps, self.run.samples, self.loader.position)
        found: dict[str, Any] = {"type": None}
        try:
            (self.run.evaluate if place == "in an evaluation" else self.run.train_batch)(batch)
        except Exception as error:
            found = {"type": type(error).__name__, "text": str(error)}
            if isinstance(error, zerowatch.PeerFailedError):
                found["rank"], found["error type"] = error.rank, error.error_type
                found["can continue"] = error.can_continue
        found["counts kept"] = before == (self.run.steps, self.run.samples, self.loader.position)
        self.place = ""
        return found

    def train(self, failures: list[tuple[int, str]]) -> tuple[dict[str, Any], torch.Tensor]:
        found = {}
        for window in range(9):
            batch = next(self.batches)
            for at, place in failures:
                if at == window:
                    found[f"{place}, window {window}"] = self.attempt(place, batch)
            self.run.train_batch(batch)  # the same batch again
        trained = weights(self.run.engine)
        self.run.close()
        self.run.engine.destroy()
        return found, trained


def check_stage(zero: dict[str, Any]) -> dict[str, Any]:
    failures = [*FAILURES, *([] if zero["stage"] == 3 else [IN_THE_MODEL_LATER])]
    found, trained = Job(zero).train(failures)
    _, expected = Job(zero).train([])
    return {"failures": found, "same weights": torch.equal(trained, expected)}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(SAMPLES))


class Unsized:
    def __getitem__(self, index: int) -> int:
        return index


def check_loaders() -> dict[str, Any]:
    """Make loaders whose arguments differ on rank 1; return the error of each."""
    job, is_other = Job({"stage": 0}), dist.get_rank() == 1
    cases: dict[str, Callable[[], Any]] = {
        "length": lambda: job.run.loader(data(SAMPLES + is_other), batch_samples=8),
        "seed": lambda: job.run.loader(data(), batch_samples=8, seed=int(is_other)),
        "batch": lambda: job.run.loader(data(), batch_samples=16 if is_other else 8),
        "shuffle": lambda: job.run.loader(data(), batch_samples=8, shuffle=is_other),
        "stream": lambda: job.run.loader(Stream() if is_other else data(), batch_samples=8),
        "own error": lambda: job.run.loader(Unsized() if is_other else data(), batch_samples=8),
        "equal": lambda: job.run.loader(data(), batch_samples=8),
        "equal streams": lambda: job.run.loader(Stream(), batch_samples=8, seed=int(is_other)),
    }
    found = {}
    for name, make in cases.items():
        try:
            make()
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    job.run.close()
    job.run.engine.destroy()
    return found


def check_positions() -> str:
    """Load a position that differs on rank 1; return the error."""
    job = Job({"stage": 0})
    next(job.batches)
    state = job.run._data.state_dict()
    if dist.get_rank() == 1:
        state["data"]["position"] += 1
    try:
        job.run._data.load_state_dict(state)
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        job.run.close()
        job.run.engine.destroy()


def outcomes(job: Job, place: str) -> list[dict[str, Any]]:
    """Return what this rank caught in the window that fails, and in two calls after it."""
    found = []
    for _ in range(3):
        began = time.monotonic()
        found.append(job.attempt(place, next(job.batches)))
        found[-1]["seconds"] = time.monotonic() - began
        place = ""
    return found


def check_failed_update() -> list[dict[str, Any]]:
    """Fail on rank 1 at the end of an update that is not guarded, after its collectives."""
    job = Job(ENGINES["stage 0"])
    update = job.run.engine.step

    def step() -> None:
        update()
        raise KeyError("a schedule of the script's own")

    for _ in range(5):
        job.run.train_batch(next(job.batches))
    if dist.get_rank() == 1:
        job.run.engine.step = step
    found = outcomes(job, "")
    job.run.close()
    job.run.engine.destroy()
    return found


def check_failed_gather() -> list[dict[str, Any]]:
    """Fail on rank 1 in the model, while rank 0 waits for it in a gather.

    It waits until the process of rank 1 has ended, so this is the last check.
    """
    job = Job(ENGINES["stage 3"])
    for _ in range(5):
        job.run.train_batch(next(job.batches))
    return outcomes(job, "in the model")


def main(folder: Path) -> None:
    """Run all cases."""
    logging.disable(logging.WARNING)
    deepspeed.init_distributed("gloo", verbose=False)
    found: dict[str, Any] = {}
    file = folder / f"rank-{dist.get_rank()}.json"
    checks: dict[str, Callable[[], Any]] = {"loaders": check_loaders, "positions": check_positions}
    checks |= {name: (lambda zero=zero: check_stage(zero)) for name, zero in ENGINES.items()}
    checks |= {"failed update": check_failed_update, "failed gather": check_failed_gather}
    run_end.CONSENSUS_SECONDS = 1.0  # how long a failed rank waits for others that failed, too
    for name, check in checks.items():
        faulthandler.dump_traceback_later(WATCHDOG_SECONDS, exit=True)
        found[name] = check()
        file.write_text(json.dumps(found))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
