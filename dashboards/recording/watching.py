"""What watching costs."""

from __future__ import annotations

from ...metrics.catalog import watching
from ..promql import by, rate
from .rule import recorded

WATCH_RATIO_BY_RANK = recorded(
    watching.WATCH_SECONDS,
    "rate5m",  # seconds per second: a ratio as it stands
    lambda timing: by("sum", rate(watching.WATCH_SECONDS, timing.short), "rank"),
    "rank",
)
WATCH_RATIO_BY_PART = recorded(
    watching.WATCH_SECONDS,
    "avg_rate5m",
    lambda timing: by("avg", rate(watching.WATCH_SECONDS, timing.short), "part"),
    "part",
)

RULES = (
    WATCH_RATIO_BY_RANK,
    WATCH_RATIO_BY_PART,
)
