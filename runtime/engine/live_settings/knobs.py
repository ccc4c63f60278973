"""Every knob of a live engine, as data."""

from __future__ import annotations

from typing import Any

from ...common.deepspeed_internals import ENGINE
from ...common.deepspeed_internals_live_settings import missing
from ...common.undo import set_attributes
from .buckets import CONTIGUOUS_GRADIENTS, MULTI_RANK_BUCKET_ALLREDUCE, OVERLAP_COMM, REDUCE_SCATTER
from .knob import Knob
from .prefetch import (
    MAX_LIVE_PARAMETERS,
    MAX_REUSE_DISTANCE,
    PARAM_PERSISTENCE_THRESHOLD,
    PREFETCH_BUCKET_SIZE,
)
from .reduce_bucket import REDUCE_BUCKET_SIZE


def _timer_refusal(engine: Any) -> str | None:
    gone = missing(engine, ENGINE, "tput_timer")
    if gone is None and not hasattr(engine.tput_timer, "config"):
        return "this DeepSpeed's throughput timer has no setting"
    return gone


# DeepSpeed waits for the device twice in each micro-batch, to time it; by default.
TIMER_SYNCHRONIZED = Knob(
    name="timers.throughput.synchronized",
    least=None,
    exact=True,
    refusal=_timer_refusal,
    get=lambda engine: bool(engine.tput_timer.config.synchronized),
    change=lambda engine, value: set_attributes(engine.tput_timer.config, synchronized=value),
    holds=lambda _, __: True,
    memory=lambda _, __: 0,
)

KNOBS: tuple[Knob, ...] = (
    REDUCE_BUCKET_SIZE,
    REDUCE_SCATTER,
    MULTI_RANK_BUCKET_ALLREDUCE,
    CONTIGUOUS_GRADIENTS,
    OVERLAP_COMM,
    PREFETCH_BUCKET_SIZE,
    MAX_LIVE_PARAMETERS,
    MAX_REUSE_DISTANCE,
    PARAM_PERSISTENCE_THRESHOLD,
    TIMER_SYNCHRONIZED,
)
