"""Lists all live settings; `MinimalBuckets` sets several settings to their minimum at once."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...common.deepspeed_internals import ENGINE, missing_reason
from ...common.undo import Undo, UndoOnce, apply_all, set_attributes
from .bucket_settings import (
    CONTIGUOUS_GRADIENTS_SETTING,
    MULTI_RANK_BUCKET_ALLREDUCE_SETTING,
    OVERLAP_COMM_SETTING,
    REDUCE_BUCKET_SIZE_SETTING,
    REDUCE_SCATTER_SETTING,
)
from .config_entry import STAGE_3, entry_in, with_entry
from .live_setting import LiveSetting, SettingValue
from .prefetch_settings import (
    MAX_LIVE_PARAMETERS_SETTING,
    MAX_REUSE_DISTANCE_SETTING,
    PARAM_PERSISTENCE_THRESHOLD_SETTING,
    PREFETCH_BUCKET_SIZE_SETTING,
)
from .zero_optimizer import num_elements


class _TimerSynchronized(LiveSetting):
    """Sets whether DeepSpeed's throughput timer waits for the device, twice in each micro-batch."""

    name = "timers.throughput.synchronized"
    uses_optimizer = False

    def _unsupported_reason(self, engine: Any) -> str | None:
        missing = missing_reason(engine, ENGINE, "tput_timer")
        if missing is None and not hasattr(engine.tput_timer, "config"):
            return "this DeepSpeed's throughput timer has no setting"
        return missing

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

# With these values ZeRO 3 gathers a module's parameters when the module runs, and then releases
# them.
NO_PREFETCH: Mapping[LiveSetting, int] = {
    PREFETCH_BUCKET_SIZE_SETTING: 0,
    MAX_LIVE_PARAMETERS_SETTING: 0,
    MAX_REUSE_DISTANCE_SETTING: 0,
    PARAM_PERSISTENCE_THRESHOLD_SETTING: 0,
}


class MinimalBuckets:
    """Sets an engine's gradient and parameter buffers to their minimum.

    The engine's ds config has the sizes too, because its collectives are estimated from it.
    """

    def unsupported_reason(self, engine: Any) -> str | None:
        """Return why smaller buffers would free no memory on this engine; None if they may."""
        return None if _to_lower(engine) else "each size is at its minimum already"

    def attach(self, engine: Any) -> Undo:
        """Lower the sizes between two windows, and return the undo."""
        lowered = _to_lower(engine)
        changes = [partial(setting.apply, engine, minimum) for setting, minimum in lowered]
        return apply_all([*changes, partial(_write_to_config, engine, lowered)])


def _to_lower(engine: Any) -> list[tuple[LiveSetting, int]]:
    """Return the settings whose value is above their minimum, with the minimum."""
    prefetching = [
        (setting, minimum)
        for setting, minimum in NO_PREFETCH.items()
        if setting.unsupported_reason(engine) is None and setting.get(engine) > minimum
    ]
    bucket_size = _smallest_useful_bucket(engine)
    freed = REDUCE_BUCKET_SIZE_SETTING.memory_bytes(engine, bucket_size)
    bucket = [(REDUCE_BUCKET_SIZE_SETTING, bucket_size)] if freed and freed < 0 else []
    return [*bucket, *prefetching]


def _write_to_config(engine: Any, values: Sequence[tuple[LiveSetting, int]]) -> Undo:
    """Replace the engine's ds config by a copy with these values.

    The undo restores these entries, and keeps others that were changed in the meantime.
    """
    before = getattr(engine, "config", None)
    if not isinstance(before, Mapping):  # the path of a file
        return lambda: None
    config = before
    for setting, value in values:
        config = with_entry(config, _path(setting), value)
    engine.config = config
    reference = weakref.ref(engine)

    def undo() -> None:
        alive = reference()
        if alive is None:
            return
        if alive.config is config:
            alive.config = before
            return
        for setting, _ in values:
            path = _path(setting)
            alive.config = with_entry(alive.config, path, entry_in(before, path))

    return UndoOnce(undo)


def _path(setting: LiveSetting) -> tuple[str, str]:
    prefix = STAGE_3 if setting in NO_PREFETCH else ""
    return "zero_optimization", prefix + setting.name


def _smallest_useful_bucket(engine: Any) -> int:
    """Return the size of the largest gradient, which a smaller bucket could not split anyway."""
    return max((num_elements(each) for each in engine.module.parameters()), default=1)
