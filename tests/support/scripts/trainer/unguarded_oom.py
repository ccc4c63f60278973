"""Runs out of memory on one rank in windows that are not guarded; writes the outcome as JSON.

`unguarded_oom.py FOLDER PLAN`. The plan is a JSON list of `{"engine": NAME, "faults": [...]}`, with
the fields of a `Fault` and the number of the failing rank. Weights and losses are compared with
those of a run that used the same sizes from the start. A run that ends is the last one: its ranks
do not train on. `"with"` names what is combined with the faults: "checkpointing" of activations, a
"rebuild", "evaluate" or "save" before the first or each fault, or "no records". With
`"costs": true`, windows without a fault are counted instead.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from recovery_cases import ENGINES, ON_CUDA, Fault, zero
from recovery_ends import unarmed
from recovery_matrix import Trained, batch_of

from zerowatch.runtime.trainer.oom_recovery.collective_guard import _sequence_numbers
from zerowatch.runtime.trainer.oom_recovery.micro_batch_planner import MicroBatchPlanner
from zerowatch.runtime.trainer.oom_recovery.recorded_passes import EngineGeneration

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
CLEAN = 4  # windows before a fault, in which the passes are recorded
FIRST = 10_000  # number of a window before a rebuild
COUNTED = 4  # windows of which the collectives are counted
OWNER_2 = zero(2, use_multi_rank_bucket_allreduce=False, reduce_bucket_size=300)
ALL = {**ENGINES, "stage 2, small buckets per owner": OWNER_2}


@dataclass(frozen=True)
class RankFault(Fault):
    """Memory that is short on one rank."""

    rank: int = 1

    def strikes(self, rank: int) -> bool:
        return rank == self.rank


class Combined(Trained):
    """A run with a further feature of TrainingRun."""

    def __init__(self, options: dict[str, Any], feature: str, folder: Path) -> None:
        super().__init__(zero(0) if feature == "rebuild" else options)
        self.feature, self.folder = feature, folder
        if feature == "checkpointing":
            self.run._window_runner._engine_holder.checkpoint_activations(True)
        if feature == "no records":
            self.guard.recorder.prepare = lambda generation: 0
        if feature == "rebuild":
            self.train(FIRST, None)
            self.losses.clear()
            self.run.rebuild(options)

    def before_fault(self, window: int) -> None:
        if self.feature == "evaluate":
            self.run.evaluate(batch_of(window))
        if self.feature == "save":
            self.run.save(self.folder / "saves")


def check(
    options: dict[str, Any], faults: Sequence[RankFault], feature: str, folder: Path
) -> dict[str, Any]:
    trained = Combined(options, feature, folder)
    reasons: list[str] = []
    unfinished_reason = trained.guard.unfinished_reason

    def keep_reason() -> str:
        reasons.append(unfinished_reason())
        return reasons[-1]

    numbers: list[int] = []
    prepare = trained.guard.recorder.prepare

    def keep_number(generation: EngineGeneration) -> int:
        numbers.append(prepare(generation))
        return numbers[-1]

    trained.guard.unfinished_reason = keep_reason
    trained.guard.recorder.prepare = keep_number
    found: list[dict[str, Any]] = []
    sizes: list[int] = []
    window = 0
    for fault in faults:
        trained.replay.planner = MicroBatchPlanner()
        for _ in range(CLEAN):
            sizes.append(max(trained.train(window, None).micro_batches))
            window += 1
        trained.replay.planner = unarmed()
        trained.before_fault(window)
        reasons.clear()
        began = time.perf_counter()
        outcome: dict[str, Any] = {"fault": fault.name}
        found.append(outcome)
        try:
            result = trained.train(window, fault)
        except Exception as error:
            outcome |= {"ended": f"{type(error).__name__}: {error}", "reasons": list(reasons)}
            outcome |= {"seconds": time.perf_counter() - began, "guarded": numbers[-1] < 0}
            return {"windows": found}
        outcome |= {
            "replays": result.replays,
            "sizes": result.micro_batches,
            "reasons": list(reasons),
            "guarded": numbers[-1] < 0,
            "seconds": time.perf_counter() - began,
        }
        sizes.append(max(result.micro_batches))
        window += 1
    losses, weights = trained.losses, trained.close()
    expected = Combined(options, feature, folder)
    for number, size in enumerate(sizes):
        expected.run.set_micro_batch(size)
        expected.train(number, None)
    return {
        "windows": found,
        "same losses": losses == expected.losses,
        "same weights": torch.equal(weights, expected.close()),
    }


def costs(options: dict[str, Any]) -> dict[str, Any]:
    """Count the collectives and votes of unguarded windows, with records and without."""
    return {name: counted(options, is_recorded=name == "with") for name in ("with", "without")}


def counted(options: dict[str, Any], *, is_recorded: bool) -> dict[str, list[int]]:
    trained = Trained(options)
    if not is_recorded:
        begin_window = trained.guard.recorder.begin_window
        trained.guard.recorder.begin_window = lambda is_recording: begin_window(is_recording=False)
    for window in range(CLEAN):
        trained.train(window, None)
    trained.replay.planner = unarmed()
    found: dict[str, list[int]] = {"collectives": [], "votes": []}
    for window in range(CLEAN, CLEAN + COUNTED):
        collectives, votes = sum(_sequence_numbers().values()), trained.num_votes
        trained.train(window, None)
        found["collectives"].append(sum(_sequence_numbers().values()) - collectives)
        found["votes"].append(trained.num_votes - votes)
    trained.close()
    return found


def main(folder: Path, plan: list[dict[str, Any]]) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    faulthandler.enable()
    deepspeed.init_distributed("nccl" if ON_CUDA else "gloo", verbose=False)
    gc.freeze()
    found = []
    for each in plan:
        options = ALL[each["engine"]]
        if each.get("costs"):
            found.append(costs(options))
        else:
            faults = [RankFault(**fault) for fault in each["faults"]]
            found.append(check(options, faults, each.get("with", ""), folder))
        (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
        if any("ended" in window for window in found[-1].get("windows", ())):
            break


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
