"""The tables of the dashboard Overview: firing alerts and slowest ranks."""

from __future__ import annotations

from ...metrics.thresholds import (
    COMM_RATIO_HIGH,
    DEVICE_UTILIZATION_LOW,
    OOM_RISK_CRITICAL,
    OOM_RISK_HIGH,
    STRAGGLER_SCORE_HIGH,
)
from .. import recording_rules as recorded
from ..grafana.panels import Column, Table, Text
from ..grafana.style import (
    RATIO,
    SECONDS,
    above,
    below,
)
from ..promql import ON_GPU, by, where
from .queries import RUN, of_ranks

FIRING = f'ALERTS{{{", ".join(RUN)}, alertstate="firing"}}'

SLOWEST = 10

_SLOWEST = f"topk({SLOWEST}, {by('max', of_ranks(recorded.STRAGGLER_SCORE), 'rank')})"


def of_the_slowest(expression: str) -> str:
    """Keep the ranks that are most behind."""
    return where(by("max", expression, "rank"), _SLOWEST, "rank")


DETAILS = (
    Table(
        title="Alerts firing",
        description="Should be empty. The runbook's page on an alert explains what it means, how "
        "to confirm it and what to do first.",
        labels={"alertname": "Alert", "severity": "Severity", "rank": "Rank"},
        columns=(Column(title="", expression=f"max by (alertname, severity, rank) ({FIRING})"),),
        empty="no alert is firing",
        width=10,
    ),
    Table(
        title=f"The {SLOWEST} slowest ranks",
        description="**Behind** is how far a rank is behind the median rank, as a share of a step. "
        "One slow rank delays all others: check its node, its device and its data.",
        labels={"rank": "Rank"},
        columns=(
            Column(
                title="Behind",
                expression=_SLOWEST,
                unit=RATIO,
                thresholds=above(STRAGGLER_SCORE_HIGH),
                decimals=1,
            ),
            Column(
                title="Step time",
                expression=of_the_slowest(of_ranks(recorded.STEP_SECONDS_BY_RANK)),
                unit=SECONDS,
            ),
            Column(
                title="Exposed",
                expression=of_the_slowest(of_ranks(recorded.EXPOSED_RATIO_BY_RANK)),
                unit=RATIO,
                thresholds=above(COMM_RATIO_HIGH),
                decimals=1,
            ),
            Column(
                title="GPU busy",
                expression=of_the_slowest(of_ranks(recorded.DEVICE_UTILIZATION_BY_RANK, ON_GPU)),
                unit=RATIO,
                thresholds=below(DEVICE_UTILIZATION_LOW),
                decimals=0,
            ),
            Column(
                title="Memory risk",
                expression=of_the_slowest(of_ranks(recorded.OOM_RISK)),
                unit=RATIO,
                thresholds=above(OOM_RISK_HIGH, OOM_RISK_CRITICAL),
                decimals=0,
            ),
        ),
        sort_by="Behind",
        width=14,
    ),
    Text(
        title="How to read these dashboards",
        description="What all dashboards have in common.",
        content="Figures over a run are means of the last five minutes. A graph of many ranks "
        "shows those that were worst in the selected time; choose ranks at the top to see others. "
        "Each panel's **(i)** explains how to read it and what to do. Lines across a graph are "
        "thresholds of alerts. Marks below a graph are alerts, the tuner's decisions and starts of "
        "runs. Links at the top lead to the other dashboards and keep your choice.",
        width=24,
        height=3,
    ),
)
