"""Runs out of memory with no memory saving left, and without votes; writes the outcome as JSON.

`recovery_ends.py FOLDER`, on two ranks; rank r writes FOLDER/rank-r.json.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from recovery_cases import ENGINES, ON_CUDA, WANTED, Fault, take
from recovery_matrix import Trained

from zerowatch.runtime.trainer.engine_change import EngineChange
from zerowatch.runtime.trainer.oom_recovery.escalation import EscalationPolicy
from zerowatch.runtime.trainer.oom_recovery.micro_batch_planner import (
    GuardSchedule,
    MicroBatchPlanner,
)
from zerowatch.runtime.trainer.window.window_agreement import LocalBatches

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

NEVER_ON_ONE = Fault("backward", 1, 0, 0, "one", is_real=False)
TWO_ON_ALL = Fault("forward", 1, 1, 2, "all", is_real=False)
TWO_ON_ONE = Fault("forward", 1, 1, 2, "one", is_real=False)
LATE_ON_ALL = Fault("forward", 2, 1, 2, "all", is_real=False)


def unarmed() -> MicroBatchPlanner:
    """Return a planner whose next window is not guarded."""
    planner = MicroBatchPlanner()
    planner.guard_schedule = GuardSchedule(windows_left=0, longest=2**40)
    planner._largest_requested = WANTED
    batches = LocalBatches(samples=[1, 1], micro_batch_samples=[WANTED] * 2, length=1)
    assert not planner.begin_window(batches, guard_requested=False)
    return planner


def disarm(trained: Trained) -> None:
    """Hold no votes in the next window, although its passes have no records."""
    trained.replay.planner = unarmed()
    trained.guard.recorder._windows_left = 0


def gives_up(name: str) -> dict[str, Any]:
    """Fail in one window at every size, train on; return whether the engine is unchanged."""
    trained = Trained(ENGINES[name])
    trained.replay._escalation = EscalationPolicy()
    trained.train(0, None)
    error = None
    try:
        trained.train(1, NEVER_ON_ONE)
    except RuntimeError as raised:
        error = raised
    found = {"type": type(error).__name__, "text": str(error), "steps": trained.run.steps}
    trained.replay.planner = MicroBatchPlanner()
    trained.train(2, None)
    weights = trained.close()

    expected = Trained(ENGINES[name])
    expected.train(0, None)
    expected.train(2, None)
    return found | {"intact": torch.equal(weights, expected.close())}


@dataclass(frozen=True)
class Recorded:
    """Memory saving that records its call and removes the fault."""

    change: EngineChange
    trained: Trained
    has_effect: bool
    applied: list[str]

    def apply(self) -> bool:
        self.applied.append(self.change.name)
        if self.has_effect:
            self.trained.fault = None
        return self.has_effect


def escalates(name: str) -> dict[str, Any]:
    """Run out of memory until the second escalation helps."""
    trained = Trained(ENGINES[name])
    asked: list[str] = []
    trained.replay._escalation = EscalationPolicy(
        [
            Recorded(EngineChange.ACTIVATION_CHECKPOINTING, trained, False, asked),
            Recorded(EngineChange.MINIMAL_BUCKETS, trained, True, asked),
        ]
    )
    result = trained.train(0, NEVER_ON_ONE)
    found = {"asked": asked, "sizes": result.micro_batches, "replays": result.replays}
    trained.close()
    return found


def without_votes(name: str, fault: Fault) -> dict[str, Any]:
    """Run out of memory in a window that is not guarded."""
    trained = Trained(ENGINES[name])
    trained.train(0, None)
    disarm(trained)
    votes = trained.num_votes
    result = trained.train(1, fault)
    found = {"replays": result.replays, "votes": trained.num_votes - votes}
    trained.close()
    return found


def in_two_places(name: str, fault: Fault) -> dict[str, Any]:
    """Run out of memory without votes: on rank 1 in the model, on rank 0 after it, in the loss."""
    trained = Trained(ENGINES[name])
    trained.train(0, None)
    trained.train(1, None)
    disarm(trained)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        fault, trained.fault = trained.fault, None
        mean = trained.loss(model, batch)
        trained.fault = fault
        if fault is not None and len(trained.attempt) == 1 + fault.micro_batch:
            take(batch["x"], fault)
        return mean

    if dist.get_rank() == 0:
        trained.run._window_runner._loss = loss
    result = trained.train(2, fault)
    trained.close()
    return {"replays": result.replays}


def main(folder: Path) -> None:
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    faulthandler.dump_traceback_later(150, exit=True)
    deepspeed.init_distributed("nccl" if ON_CUDA else "gloo", verbose=False)
    gc.freeze()
    found = {
        "gives up": {name: gives_up(name) for name in ("stage 1", "stage 3, small buckets")},
        "escalates": escalates("stage 2"),
        "all run out, no votes": {
            name: without_votes(name, TWO_ON_ALL) for name in ("stage 2", "stage 3")
        },
        "one runs out, no votes": without_votes("stage 1", TWO_ON_ONE),
        "in two places, no votes": in_two_places("stage 3, eager prefetching", LATE_ON_ALL),
    }
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
