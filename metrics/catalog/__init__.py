"""The catalog: every metric as plain data. No other package contains the name of a metric."""

from __future__ import annotations

from . import (
    across_ranks,
    communication,
    devices,
    generation,
    memory,
    overhead,
    training,
    tuner,
    window,
)
from .spec import MetricSpec

CATALOG: tuple[MetricSpec, ...] = (
    *training.METRICS,
    *window.METRICS,
    *generation.METRICS,
    *communication.METRICS,
    *memory.METRICS,
    *devices.METRICS,
    *across_ranks.METRICS,
    *tuner.METRICS,
    *overhead.METRICS,
)
BY_NAME = {spec.name: spec for spec in CATALOG}
