"""What watching costs."""

from __future__ import annotations

from ...metrics.catalog import overhead
from ..promql import by, rate
from .rule import recorded

WATCH_RATIO_BY_RANK = recorded(
    overhead.WATCH_SECONDS,
    "rate5m",  # seconds per second: already a ratio
    lambda timing: by("sum", rate(overhead.WATCH_SECONDS, timing.short), "rank"),
    "rank",
)
WATCH_RATIO_BY_PART = recorded(
    overhead.WATCH_SECONDS,
    "avg_rate5m",
    lambda timing: by("avg", rate(overhead.WATCH_SECONDS, timing.short), "part"),
    "part",
)

RULES = (
    WATCH_RATIO_BY_RANK,
    WATCH_RATIO_BY_PART,
)
