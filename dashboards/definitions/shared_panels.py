"""Panels and panel options that several dashboards share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...metrics.catalog.training import STEP_DURATION
from .. import recording_rules as recorded
from ..grafana.links import JOB_HEADING, RUN_HEADING, RUNBOOK_PAGE
from ..grafana.panels import (
    ANY_IS_BAD,
    BAD,
    DAYS_AND_HOURS,
    GOOD,
    NEUTRAL,
    PLAIN,
    SECONDS,
    WARNING,
    Column,
    Named,
    Panel,
    Query,
    SeriesHeatmap,
    Stat,
    Table,
    TimeSeries,
)
from ..promql import by, rate, ratio, where
from ..recording_rules import RecordingRule
from ..run_status import RunStatus
from .queries import FIRST_RANK, RANK, RUN, WINDOW, by_node, by_rank, of_run

# The color of each phase, by its legend, so that a phase looks the same on every dashboard.
PHASE_COLORS = {
    "forward": "blue",
    "backward": "purple",
    "optimizer": "yellow",
    "data": "orange",
    "other": "text",
    "eval": "super-light-green",
    "generate": "red",
    "checkpoint": "dark-green",
}
STATE_COLORS = {
    RunStatus.TRAINING: GOOD,
    RunStatus.STARTING: "blue",
    RunStatus.STALLED: BAD,
    RunStatus.HANGING: BAD,
    RunStatus.COMPLETED: NEUTRAL,
    RunStatus.INTERRUPTED: NEUTRAL,
    RunStatus.PEER_FAILED: BAD,
    RunStatus.HANG_ABORT: BAD,
    RunStatus.EXCEPTION: BAD,
    RunStatus.OUT_OF_MEMORY: BAD,
    RunStatus.ENDED: WARNING,
    RunStatus.VANISHED: BAD,
}
STATES = tuple(
    Named(state, state.name.lower().replace("_", " "), color)
    for state, color in STATE_COLORS.items()
)
# Shown in place of a value by panels that only a TrainingRun fills.
NOT_A_TRAINING_RUN = "no figures of a TrainingRun"
# Lean detail does not serve all metrics.
NONE_KNOWN = "none, or not served"
NOT_KNOWN = "not known"
SAMPLES_SHARED = "not known, or ranks share samples"
TABLE_ROWS = 10  # the most rows that a table of ranks has
RANK_LEGEND = "rank {{rank}} {{node}}"
ALERT_LABELS = ("node", "rank", "device")  # that say where the cause is


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
    labels: tuple[str, ...] = RANK,
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


def alert_table(*matchers: str, **more: Any) -> Table:
    """Return a table of the alerts that fire, with their rank, node and page of the runbook.

    Args:
        matchers: Label matchers of the runs; by default those of the chosen run. If they name no
            run, the table has the columns job and run.
        more: Further fields of `Table`.
    """
    of_one_run = not matchers
    matchers = matchers or RUN
    labels = ("job", "run", "alertname", "severity", *ALERT_LABELS)
    selector = ", ".join(matchers)
    firing = f'ALERTS{{{selector}, alertstate="firing"}}'
    since = f"ALERTS_FOR_STATE{{{selector}}}"
    # ALERTS_FOR_STATE has the time at which the expression of the alert became true.
    names = ", ".join(labels)
    seconds = f"time() - max by ({names}) ({since})\nand on ({names}) {firing}"
    page = f'label_join({seconds}, "{RUNBOOK_PAGE}", "", "alertname")'
    headings = {"alertname": "Alert", "severity": "Severity"}
    if not of_one_run:
        headings = {"run": RUN_HEADING, "job": JOB_HEADING, **headings}
    return Table(
        title="Alerts firing",
        description="The alerts that fire now; the table should be empty. Its page in the runbook "
        "explains what an alert means, how to confirm it and what to do first: follow the link in "
        "the last column. A click on a rank or a node shows it alone.",
        labels={
            **headings,
            **{label: label.title() for label in ALERT_LABELS},
            RUNBOOK_PAGE: "Runbook",
        },
        columns=(Column(title="Since", expression=page, unit=DAYS_AND_HOURS),),
        after=("Runbook",),
        lower_case=("Runbook",),
        sort_by="Since",
        ascending=True,
        widths={"Alert": 240, "Runbook": 240, "Severity": 90, "Rank": 70, "Device": 90},
        empty="no alert is firing",
        **more,
    )


def heatmaps(
    rule: RecordingRule,
    *matchers: str,
    title: str,
    description: str,
    operation: str = "max",
    **more: Any,
) -> tuple[SeriesHeatmap, SeriesHeatmap]:
    """Return two heatmaps of a figure of ranks over time: a row for each node, and for each rank.

    Args:
        rule: The figure; it has the labels rank and node.
        matchers: Further matchers.
        title: What the figure is.
        description: How to read it and what to do.
        operation: How the ranks of a node, and the devices of a rank, are combined.
        more: Further fields of `SeriesHeatmap`.
    """
    return (
        SeriesHeatmap(
            title=f"{title}, by node",
            description=f"{description} A row is a node, with its worst rank.",
            queries=(Query(by_node(operation, rule, *matchers), "{{node}}"),),
            width=8,
            height=12,
            **more,
        ),
        SeriesHeatmap(
            title=f"{title}, by rank",
            description=f"{description} A row is a rank; the ranks of a node are neighbors. Choose "
            "nodes or ranks at the top to enlarge the rows.",
            queries=(Query(by_rank(operation, rule, *matchers), "{{node}} rank {{rank}}"),),
            width=16,
            height=12,
            **more,
        ),
    )


def step_seconds() -> TimeSeries:
    """Return the panel of step times, whose exemplars link to traces.

    The exemplars are those of rank 0: the ranks of a run share their traces, so one rank is enough.
    """
    # A sum, because for a while there are two series of a rank that has moved to another address.
    total, number, buckets = (
        by("sum", rate(STEP_DURATION, WINDOW, *FIRST_RANK, part=part))
        for part in ("_sum", "_count", "_bucket")
    )
    # The exemplars belong to the series of buckets, which have to occur in the query. They add
    # nothing to it, and Prometheus may have dropped them.
    mean_of_first_rank = f"{ratio(total, number)}\nor {buckets} < 0"
    rules = {
        "fastest rank": recorded.STEP_QUANTILE_MIN,
        "middle rank": recorded.STEP_QUANTILE_MEDIAN,
        "slowest rank": recorded.STEP_QUANTILE_MAX,
    }
    return TimeSeries(
        title="Step time",
        description="Exact median and 99th percentile of the step time of each rank over the last "
        "minute (or 20 steps): the smallest, the median and the largest of all ranks. If p99 is "
        "far above the median, single steps stall: point at a diamond in the graph and follow its "
        "link to the trace of that step. If the slowest rank is far above the middle one, see the "
        "ranks that delay the others.",
        queries=(
            *(
                Query(of_run(rule, f'quantile="{quantile}"'), f"{name}, {rank}")
                for quantile, name in (("0.5", "median"), ("0.99", "p99"))
                for rank, rule in rules.items()
            ),
            Query(mean_of_first_rank, "mean of rank 0", exemplars=True),
        ),
        unit=SECONDS,
        minimum=0,
        colors={
            "median, fastest rank": "super-light-blue",
            "median, middle rank": "blue",
            "median, slowest rank": "dark-blue",
            "p99, fastest rank": "super-light-orange",
            "p99, middle rank": "orange",
            "p99, slowest rank": "dark-orange",
            "mean of rank 0": "text",
        },
    )
