"""Panels used on more than one dashboard."""

from __future__ import annotations

from dataclasses import replace

from ...metrics.catalog.training import STEP_SECONDS
from .. import recording_rules as recorded
from ..grafana.panels import Panel, TimeSeries
from ..grafana.style import SECONDS, Query
from ..promql import rate
from .queries import FIRST_RANK, WINDOW, quantile


def sized(width: int, height: int, *panels: Panel) -> tuple[Panel, ...]:
    """Give panels one size, in columns and rows."""
    return tuple(replace(panel, width=width, height=height) for panel in panels)


def step_seconds() -> TimeSeries:
    """Return the panel of step times; exemplars of rank 0 lead to traces, which ranks share."""
    of_first_rank = rate(STEP_SECONDS, WINDOW, *FIRST_RANK, part="_bucket")
    return TimeSeries(
        title="Step time",
        description="Median and slow steps, over all ranks. If p99 is far above the median, single "
        "steps stall: point at a diamond and follow it to the trace of that step.",
        queries=(
            Query(quantile(0.5, recorded.STEP_BUCKETS), "median"),
            Query(quantile(0.95, recorded.STEP_BUCKETS), "p95"),
            Query(quantile(0.99, recorded.STEP_BUCKETS), "p99"),
            Query(f"histogram_quantile(0.5, {of_first_rank})", "median of rank 0", exemplars=True),
        ),
        unit=SECONDS,
        minimum=0,
    )
