"""Panels and panel options that several dashboards share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...metrics.catalog.training import STEP_DURATION
from .. import recording_rules as recorded
from ..grafana.panels import (
    ANY_IS_BAD,
    PLAIN,
    SECONDS,
    Column,
    Panel,
    Query,
    Stat,
    Table,
    TimeSeries,
)
from ..promql import rate, where
from .queries import FIRST_RANK, WINDOW, quantile

# The color of each phase, by its legend, so that a phase looks the same on every dashboard.
PHASE_COLORS = {
    "forward": "blue",
    "backward": "purple",
    "optimizer": "yellow",
    "data": "orange",
    "other": "text",
    "eval": "super-light-green",
    "checkpoint": "dark-green",
}
# Shown in place of a value by panels that only a TrainingRun fills.
NOT_A_TRAINING_RUN = "not a TrainingRun"
TABLE_ROWS = 10  # the most rows that a table of ranks has


def sized(width: int, height: int, *panels: Panel) -> tuple[Panel, ...]:
    """Return the panels with the same width in columns and the same height in rows."""
    return tuple(replace(panel, width=width, height=height) for panel in panels)


def fault_count(*, title: str, description: str, expression: str, legend: str, **more: Any) -> Stat:
    """Return a panel of the current value of a counter that is red above 0.

    Args:
        title: The panel's title.
        description: The panel's help text.
        expression: PromQL; each series is shown as a figure.
        legend: The name of each figure.
        more: Further fields of `Stat`.
    """
    return Stat(
        title=title,
        description=description,
        queries=(Query(expression, legend, shape="now"),),
        unit=PLAIN,
        thresholds=ANY_IS_BAD,
        plain=True,
        **more,
    )


def rank_table(
    *,
    title: str,
    description: str,
    columns: tuple[Column, ...],
    labels: tuple[str, ...] = ("rank",),
    lowest: bool = False,
    **more: Any,
) -> Table:
    """Return a table of the ranks that have the highest values in its first column.

    Args:
        title: The panel's title.
        description: The panel's help text.
        columns: The columns; every expression is aggregated by job, run and `labels`.
        labels: What a row stands for: a rank, or a device or phase of a rank.
        lowest: Whether to show the lowest values of the first column instead.
        more: Further fields of `Table`.
    """
    first, *others = columns
    worst = f"{'bottomk' if lowest else 'topk'}({TABLE_ROWS}, {first.expression})"
    options = {"sort_by": first.title, "ascending": lowest, **more}
    return Table(
        title=title,
        description=description,
        labels={label: label.title() for label in labels},
        columns=(
            replace(first, expression=worst),
            *(replace(each, expression=where(each.expression, worst, *labels)) for each in others),
        ),
        **options,
    )


def step_seconds() -> TimeSeries:
    """Return the panel of step times, whose exemplars link to traces.

    The exemplars are those of rank 0: the ranks of a run share their traces, so one rank is enough.
    """
    of_first_rank = rate(STEP_DURATION, WINDOW, *FIRST_RANK, part="_bucket")
    return TimeSeries(
        title="Step time",
        description="Median, 95th and 99th percentile of the step time, over all ranks. If p99 is "
        "far above the median, single steps stall: point at a diamond in the graph and follow its "
        "link to the trace of that step.",
        queries=(
            Query(quantile(0.5, recorded.STEP_BUCKETS), "median"),
            Query(quantile(0.95, recorded.STEP_BUCKETS), "p95"),
            Query(quantile(0.99, recorded.STEP_BUCKETS), "p99"),
            Query(f"histogram_quantile(0.5, {of_first_rank})", "median of rank 0", exemplars=True),
        ),
        unit=SECONDS,
        minimum=0,
    )
