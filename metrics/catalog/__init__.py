"""Every metric, as data. Metric names are written here only."""

from __future__ import annotations

from . import communication, devices, memory, overhead, training, tuner, window
from .spec import MetricSpec

CATALOG: tuple[MetricSpec, ...] = (
    *training.METRICS,
    *window.METRICS,
    *communication.METRICS,
    *memory.METRICS,
    *devices.METRICS,
    *tuner.METRICS,
    *overhead.METRICS,
)
