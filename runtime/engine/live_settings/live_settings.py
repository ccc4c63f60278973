"""List of all live settings, and the one of the throughput timer."""

from __future__ import annotations

from typing import Any

from ...common.deepspeed_internals import ENGINE, missing_reason
from ...common.undo import Undo, set_attributes
from .bucket_settings import (
    CONTIGUOUS_GRADIENTS_SETTING,
    MULTI_RANK_BUCKET_ALLREDUCE_SETTING,
    OVERLAP_COMM_SETTING,
    REDUCE_BUCKET_SIZE_SETTING,
    REDUCE_SCATTER_SETTING,
)
from .live_setting import LiveSetting, SettingValue
from .prefetch_settings import (
    MAX_LIVE_PARAMETERS_SETTING,
    MAX_REUSE_DISTANCE_SETTING,
    PARAM_PERSISTENCE_THRESHOLD_SETTING,
    PREFETCH_BUCKET_SIZE_SETTING,
)


class _TimerSynchronized(LiveSetting):
    """By default DeepSpeed's throughput timer waits for the device twice in each micro-batch."""

    name = "timers.throughput.synchronized"

    def unsupported_reason(self, engine: Any) -> str | None:
        gone = missing_reason(engine, ENGINE, "tput_timer")
        if gone is None and not hasattr(engine.tput_timer, "config"):
            return "this DeepSpeed's throughput timer has no setting"
        return gone

    def get(self, engine: Any) -> bool:
        return bool(engine.tput_timer.config.synchronized)

    def _set(self, engine: Any, value: SettingValue) -> Undo:
        return set_attributes(engine.tput_timer.config, synchronized=value)

    def _memory_bytes(self, engine: Any, value: SettingValue) -> int | None:
        return 0


TIMER_SYNCHRONIZED_SETTING = _TimerSynchronized()

LIVE_SETTINGS: tuple[LiveSetting, ...] = (
    REDUCE_BUCKET_SIZE_SETTING,
    REDUCE_SCATTER_SETTING,
    MULTI_RANK_BUCKET_ALLREDUCE_SETTING,
    CONTIGUOUS_GRADIENTS_SETTING,
    OVERLAP_COMM_SETTING,
    PREFETCH_BUCKET_SIZE_SETTING,
    MAX_LIVE_PARAMETERS_SETTING,
    MAX_REUSE_DISTANCE_SETTING,
    PARAM_PERSISTENCE_THRESHOLD_SETTING,
    TIMER_SYNCHRONIZED_SETTING,
)
