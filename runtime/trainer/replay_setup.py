"""The windows of a TrainingRun: cut by what fits, and run again where memory ran out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from deepspeed.comm import comm as deepspeed_comm

from ..common.host_group import HostGroup
from .oom_recovery.abort import can_abort
from .oom_recovery.collective_guard import CollectiveGuard
from .oom_recovery.escalation import Escalation, EscalationPolicy
from .oom_recovery.fit import MemoryMeasurements
from .oom_recovery.micro_batch_planner import MicroBatchPlanner
from .oom_recovery.optimizer_states import materialise_optimizer_states
from .oom_recovery.replay import OomReplay
from .window.rng import RngState

logger = logging.getLogger(__name__)


def prepare(engine: Any) -> None:
    """Make a new engine ready to be trained through out-of-memory errors; says what is not."""
    reason = can_abort(engine)
    if reason is not None:
        logger.warning("out-of-memory errors will end this run: %s", reason)
    reason = materialise_optimizer_states(engine)
    if reason is not None:
        logger.info("the optimizer's state is made in the first step: %s", reason)


def new_replay(
    engine: Callable[[], Any],
    host_group: HostGroup,
    guard: CollectiveGuard,
    escalations: Sequence[Escalation],
    measured: Callable[[], MemoryMeasurements],
) -> OomReplay:
    """Return what runs the windows of a run.

    Args:
        engine: Returns the engine; another one after a rebuild.
        host_group: Of the run.
        guard: From `new_guard`.
        escalations: What to change when not even one sample fits.
        measured: What this rank knows of its memory.
    """
    return OomReplay(
        engine=engine,
        host_group=host_group,
        guard=guard,
        plans=MicroBatchPlanner(),
        capture_rng=lambda: RngState.capture().restore,
        escalation=EscalationPolicy(escalations),
        measured=measured,
    )


def new_guard(host_group: HostGroup) -> CollectiveGuard:
    """Return a guard on DeepSpeed's collectives, around whatever watches them; to be closed."""
    guard = CollectiveGuard(host_group)
    guard.open(deepspeed_comm.cdb)
    return guard
