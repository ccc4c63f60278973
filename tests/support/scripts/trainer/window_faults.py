"""Passes TrainingRun batches that it must reject; writes each rank's error and the effect.

`window_faults.py FOLDER`, two ranks. A rejected batch comes between two good ones; the weights must
equal those of a run that got the good ones only.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from window_checks import QUIET, Net, batches, mean_over_samples, share_of, weights

import zerowatch
import zerowatch.errors

STAGES = range(4)


def make(stage: int, loss: Any = mean_over_samples) -> zerowatch.TrainingRun:
    torch.manual_seed(0)
    model = Net()
    return zerowatch.TrainingRun(
        model,
        config={
            "train_micro_batch_size_per_gpu": 3,
            "zero_optimization": {"stage": stage},
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
        },
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=loss,
        settings=QUIET,
    )


def lengths_differ(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "labels": batch["labels"][:-1]}


def empty(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: rows[:0] for name, rows in batch.items()}


FAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "lengths differ": lengths_differ,
    "empty": empty,
    "no tensors": lambda batch: None,
    "nan": lambda batch: {**batch, "factor": torch.full((len(batch["tokens"]),), float("nan"))},
    "no weight": lambda batch: {**batch, "weightless": torch.ones(len(batch["tokens"]))},
    "loss is a number": lambda batch: {**batch, "number": torch.ones(len(batch["tokens"]))},
}
ON_ONE_RANK = ("lengths differ", "empty", "no tensors", "nan")


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    mean = mean_over_samples(model, batch)
    if "factor" in batch:
        mean = mean * batch["factor"].mean()
    if "number" in batch:
        return 1.0
    return (mean, 0.0) if "weightless" in batch else mean


def attempt(run: zerowatch.TrainingRun, batch: Any) -> str:
    try:
        run.train_batch(batch)
    except (zerowatch.errors.ZerowatchError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def main(folder: Path, names: Collection[str]) -> None:
    """Try the named faults, such as "nan, stage 2"."""
    deepspeed.init_distributed("gloo", verbose=False)
    found: dict[str, Any] = {}
    for stage in STAGES:
        faults = {name: FAULTS[name] for name in FAULTS if f"{name}, stage {stage}" in names}
        if not faults:
            continue
        shares = [share_of(batch, None) for batch in batches()]
        undisturbed = make(stage, loss_of)
        for share in shares:
            undisturbed.train_batch(share)
        expected = weights(undisturbed.engine)
        end(undisturbed)
        for name, corrupt in faults.items():
            run = make(stage, loss_of)
            run.train_batch(shares[0])
            is_corrupt = name not in ON_ONE_RANK or dist.get_rank() == 1
            error = attempt(run, corrupt(shares[1]) if is_corrupt else shares[1])
            for share in shares[1:]:
                run.train_batch(share)
            harmless = torch.equal(weights(run.engine), expected)
            found[f"{name}, stage {stage}"] = {
                "error": error,
                "harmless": harmless,
                "counts": (run.steps, run.samples),
            }
            end(run)
    found["wrong arguments"] = wrong_arguments()
    found["not discarded"] = not_discarded()
    found["batch statistics"] = batch_statistics()
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))


def end(run: zerowatch.TrainingRun) -> None:
    run.close()
    run.engine.destroy()


def wrong_arguments() -> dict[str, str]:
    run = make(1)
    calls: dict[str, Callable[[], None]] = {
        "micro-batch of 0": lambda: run.set_micro_batch(0),
        "micro-batch of x": lambda: run.set_micro_batch("x"),  # type: ignore[arg-type]
        "rebuild of 9": lambda: run.rebuild(9),  # type: ignore[arg-type]
        "rebuild to stage 9": lambda: run.rebuild({"zero_optimization": {"stage": 9}}),
        "compression of bf8": lambda: run.compress("bf8"),
    }
    errors = {name: error_of(call) for name, call in calls.items()}
    end(run)
    return errors


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def not_discarded() -> list[str]:
    """Return the errors of a batch that an engine cannot discard, and of the calls after it."""
    run = zerowatch.TrainingRun(
        torch.nn.Linear(4, 4, bias=False),
        config={"train_micro_batch_size_per_gpu": 2},
        optimizer=torch.optim.Muon,
        loss=lambda module, batch: module(batch).square().mean(),
        settings=QUIET,
    )
    good = torch.ones(4, 4)
    bad = good * float("nan") if dist.get_rank() == 1 else good
    calls = (
        partial(run.train_batch, bad),
        partial(run.train_batch, good),
        partial(run.evaluate, good),
    )
    errors = list(map(error_of, calls))
    end(run)
    return errors


def batch_statistics() -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerowatch.runtime.tuner.job_facts").addHandler(handler)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    run = zerowatch.TrainingRun(
        model,
        config={"train_micro_batch_size_per_gpu": 2},
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda module, batch: module(batch).square().mean(),
        settings=QUIET,
    )
    end(run)
    return records


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
