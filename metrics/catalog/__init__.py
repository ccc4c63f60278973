"""Every metric, as data: the one place where a metric's name stands."""

from __future__ import annotations

from . import communication, devices, memory, training, tuner, watching, window
from .spec import MetricSpec

CATALOG: tuple[MetricSpec, ...] = (
    *training.METRICS,
    *window.METRICS,
    *communication.METRICS,
    *memory.METRICS,
    *devices.METRICS,
    *tuner.METRICS,
    *watching.METRICS,
)
