"""Table of all knobs of a live engine."""

from __future__ import annotations

from typing import Any

from ...common.deepspeed_internals import ENGINE, missing_reason
from ...common.undo import Undo, set_attributes
from .bucket_knobs import (
    CONTIGUOUS_GRADIENTS,
    MULTI_RANK_BUCKET_ALLREDUCE,
    OVERLAP_COMM,
    REDUCE_BUCKET_SIZE,
    REDUCE_SCATTER,
)
from .knob import Knob, Value
from .prefetch_knobs import (
    MAX_LIVE_PARAMETERS,
    MAX_REUSE_DISTANCE,
    PARAM_PERSISTENCE_THRESHOLD,
    PREFETCH_BUCKET_SIZE,
)


class _TimerSynchronized(Knob):
    """By default DeepSpeed's throughput timer waits for the device twice in each micro-batch."""

    name = "timers.throughput.synchronized"

    def unsupported_reason(self, engine: Any) -> str | None:
        gone = missing_reason(engine, ENGINE, "tput_timer")
        if gone is None and not hasattr(engine.tput_timer, "config"):
            return "this DeepSpeed's throughput timer has no setting"
        return gone

    def get(self, engine: Any) -> bool:
        return bool(engine.tput_timer.config.synchronized)

    def _set(self, engine: Any, value: Value) -> Undo:
        return set_attributes(engine.tput_timer.config, synchronized=value)

    def _memory_bytes(self, engine: Any, value: Value) -> int | None:
        return 0


TIMER_SYNCHRONIZED = _TimerSynchronized()

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
