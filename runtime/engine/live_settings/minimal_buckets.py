"""Memory saving by the smallest useful reduce bucket and no prefetching of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...common.undo import Undo, chain
from .bucket_settings import REDUCE_BUCKET_SIZE_SETTING
from .live_setting import LiveSetting
from .prefetch_settings import (
    MAX_LIVE_PARAMETERS_SETTING,
    MAX_REUSE_DISTANCE_SETTING,
    PARAM_PERSISTENCE_THRESHOLD_SETTING,
    PREFETCH_BUCKET_SIZE_SETTING,
)
from .zero_optimizer import num_elements

# ZeRO 3 then gathers each module's parameters when it runs, and releases them after it.
NO_PREFETCH: Mapping[LiveSetting, int] = {
    PREFETCH_BUCKET_SIZE_SETTING: 0,
    MAX_LIVE_PARAMETERS_SETTING: 0,
    MAX_REUSE_DISTANCE_SETTING: 0,
    PARAM_PERSISTENCE_THRESHOLD_SETTING: 0,
}


class MinimalBuckets:
    """Setting of an engine that keeps its gradient and parameter buffers as small as possible."""

    def unsupported_reason(self, engine: Any) -> str | None:
        """Return why it would free no memory on this engine; None if it may."""
        return None if _to_lower(engine) else "each size is at its minimum already"

    def attach(self, engine: Any) -> Undo:
        """Lower the sizes between two windows, and return the undo."""
        return chain([setting.apply(engine, minimum) for setting, minimum in _to_lower(engine)])


def _to_lower(engine: Any) -> list[tuple[LiveSetting, int]]:
    """Return the settings that are above their minimum, with that minimum."""
    prefetching = [
        (setting, minimum)
        for setting, minimum in NO_PREFETCH.items()
        if setting.unsupported_reason(engine) is None and setting.get(engine) > minimum
    ]
    bucket_size = _smallest_useful_bucket(engine)
    freed = REDUCE_BUCKET_SIZE_SETTING.memory_bytes(engine, bucket_size)
    bucket = [(REDUCE_BUCKET_SIZE_SETTING, bucket_size)] if freed and freed < 0 else []
    return [*bucket, *prefetching]


def _smallest_useful_bucket(engine: Any) -> int:
    """Return the size of the largest gradient: it is reduced alone in a smaller bucket anyway."""
    return max((num_elements(each) for each in engine.module.parameters()), default=1)
