"""Runs out of memory in many ways, and trains on; writes the outcome as JSON per rank.

`recovery_matrix.py FOLDER few|all [ENGINE...]`. Each engine trains twice through the same batches:
with a fault in every other window, and without any but with the sizes that the first ended with.
Weights, losses and samples are compared.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from recovery_cases import (
    CONFIG,
    ENGINES,
    FAULTS,
    FEW_ENGINES,
    FEW_FAULTS,
    ON_CUDA,
    SAMPLES,
    WANTED,
    WIDTH,
    Fault,
    Net,
    little_room,
)

import zerowatch
from zerowatch.runtime.trainer.oom_recovery.micro_batch_planner import MicroBatchPlanner

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

WATCHDOG_SECONDS = 600  # of one window, or of making an engine, which may compile an op
WARM_UP = 2  # windows; stage 3 prefetches from the second one on
QUIET = {
    "serve": {"enabled": False},
    "run_log": {"enabled": False},
    "cross_rank": {"enabled": False},
}


class Trained:
    """A run over many windows; counts its samples and votes."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = Net()
        config = {**CONFIG, **options}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.run = zerowatch.TrainingRun(
            model, config=config, optimizer=optimizer, loss=self.loss, settings=QUIET
        )
        self.run.on_window_abort(self.forget_attempt)
        self.blocks = model.blocks
        self.states_at_start = len(self.run.engine.basic_optimizer.state)
        self.fault: Fault | None = None
        self.error = ""
        self.replay, self.guard = self.run._window_runner.replay, self.run._window_runner._guard
        self.replay.on_error.append(self.keep_error)
        self.num_votes, self.vote_seconds = 0, 0.0
        self.vote = self.guard._exchange_vote
        self.guard._exchange_vote = self.count_vote
        self.attempt: list[list[int]] = []
        self.losses: list[float] = []
        self.samples: list[int] = []

    def loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        fault = self.fault
        for number, block in enumerate(self.blocks):
            is_here = fault is not None and number == fault.block
            block.fault = fault if is_here and len(self.attempt) == fault.micro_batch else None
        self.attempt.append(batch["ids"].tolist())
        dtype = next(model.parameters()).dtype
        return (model(batch["x"].to(dtype)).float() - batch["y"]).square().mean()

    def count_vote(self, vote: int) -> int:
        self.num_votes += dist.get_world_size() > 1
        began = time.perf_counter()
        result = self.vote(vote)
        self.vote_seconds += time.perf_counter() - began
        return result

    def keep_error(self, error: BaseException) -> None:
        self.error = type(error).__name__

    def forget_attempt(self) -> None:
        self.attempt.clear()

    def train(self, window: int, fault: Fault | None) -> Any:
        """Train on one window; return its result."""
        faulthandler.dump_traceback_later(WATCHDOG_SECONDS, exit=True)
        self.attempt.clear()
        rank = dist.get_rank()
        self.fault = fault if fault is not None and fault.strikes(rank) else None
        torch.manual_seed(1000 * window + rank)
        with little_room(self.fault):
            result = self.run.train_batch(batch_of(window))
        self.losses.append(result.loss)
        self.samples.extend(itertools.chain(*self.attempt))
        return result

    def close(self) -> torch.Tensor:
        """Return the weights."""
        weights = full_weights(self.run.engine)
        self.run.close()
        self.run.engine.destroy()
        deepspeed.runtime.zero.parameter_offload.FWD_MODULE_STACK.clear()
        return weights


def batch_of(window: int) -> dict[str, torch.Tensor]:
    """Return this rank's share."""
    first = (window * dist.get_world_size() + dist.get_rank()) * SAMPLES
    generator = torch.Generator().manual_seed(first)
    return {
        "x": torch.randn(SAMPLES, WIDTH, generator=generator),
        "y": torch.randn(SAMPLES, generator=generator),
        "ids": torch.arange(first, first + SAMPLES),
    }


def full_weights(engine: Any) -> torch.Tensor:
    parts = []
    for parameter in engine.module.parameters():
        gathered = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter]) if gathered else nullcontext():
            parts.append(parameter.detach().float().flatten().clone())
    return torch.cat(parts)


def with_faults(options: dict[str, Any], faults: Sequence[Fault]) -> tuple[dict, torch.Tensor]:
    trained = Trained(options)
    found: dict[str, Any] = {"windows": []}
    for window in range(WARM_UP):
        trained.train(window, None)
    window = WARM_UP
    for fault in faults:
        trained.replay.planner = MicroBatchPlanner()  # as if nothing had been learned yet
        began = time.perf_counter()
        result = trained.train(window, fault)
        found["windows"].append(
            {
                "fault": fault.name,
                "replays": result.replays,
                "sizes": result.micro_batches,
                "expected": fault.expected,
                "error": trained.error,
                "seconds": time.perf_counter() - began,
                "then": trained.train(window + 1, None).micro_batches,
            }
        )
        window += 2
    found["states at start"] = trained.states_at_start
    found["votes"] = trained.num_votes
    found["vote_seconds"] = trained.vote_seconds
    found["losses"], found["samples"] = trained.losses, trained.samples
    return found, trained.close()


def without(
    options: dict[str, Any], windows: Sequence[dict[str, Any]]
) -> tuple[list[float], torch.Tensor]:
    """Train without a fault, with the sizes that these windows and those after them had."""
    trained = Trained(options)
    sizes = [max(window[which]) for window in windows for which in ("sizes", "then")]
    for window, size in enumerate([WANTED] * WARM_UP + sizes):
        trained.run.set_micro_batch(size)
        trained.train(window, None)
    return trained.losses, trained.close()


def check(name: str, faults: Sequence[Fault]) -> dict[str, Any]:
    began = time.perf_counter()
    faulthandler.dump_traceback_later(WATCHDOG_SECONDS, exit=True)
    found, weights = with_faults(ENGINES[name], faults)
    losses, expected = without(ENGINES[name], found["windows"])
    faulthandler.cancel_dump_traceback_later()
    own = range(len(losses))
    every = [id_ for window in own for id_ in batch_of(window)["ids"].tolist()]
    return found | {
        "seconds": time.perf_counter() - began,
        "same weights": torch.equal(weights, expected),
        "same losses": [one == other for one, other in zip(found["losses"], losses, strict=True)],
        "samples once": found.pop("samples") == every,
    }


def main(folder: Path, extent: str, engines: Sequence[str]) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    deepspeed.init_distributed("nccl" if ON_CUDA else "gloo", verbose=False)
    gc.freeze()  # a replay collects garbage, of which there is none in what is there by now
    names, faults = (FEW_ENGINES, FEW_FAULTS) if extent == "few" else (tuple(ENGINES), FAULTS)
    names = tuple(engines) or names
    if dist.get_world_size() == 1:
        faults = [fault for fault in faults if fault.ranks == "all"]
    found = {}
    for name in names:
        found[name] = check(name, faults)
        (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
