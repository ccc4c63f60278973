"""The dashboard Communication: its cost and causes, stragglers and links."""

from __future__ import annotations

from ...metrics.catalog import communication as comm
from ...metrics.thresholds import (
    COMM_COVERAGE_LOW,
    COMM_RATIO_HIGH,
    LINK_BANDWIDTH_LOW,
    STRAGGLER_SCORE_HIGH,
)
from .. import recording_rules as recorded
from ..grafana.dashboard import Dashboard, Row
from ..grafana.panels import Column, Stat, Table, TimeSeries
from ..grafana.style import (
    ANY_IS_BAD,
    PLAIN,
    PLAIN_TEXT,
    RATIO,
    Query,
    above,
    below,
)
from ..promql import by
from .communication_volume import LINK, PATTERN
from .palette import CAUSES
from .parts import sized
from .queries import of_ranks, of_run, total, worst

SCORES = by("max", of_ranks(recorded.STRAGGLER_SCORE), "rank", "phase")

AT_A_GLANCE = sized(
    6,
    5,
    Stat(
        title="Exposed communication",
        description=(
            f"Share of training time spent only on communication. Below {COMM_RATIO_HIGH:.0%} "
            "there is little to gain."
        ),
        queries=(Query(of_run(recorded.EXPOSED_RATIO), "exposed"),),
        unit=RATIO,
        thresholds=above(COMM_RATIO_HIGH / 2, COMM_RATIO_HIGH),
        decimals=1,
    ),
    Stat(
        title="Overlapped communication",
        description="Share of communication that overlaps with computation, so that training does "
        "not wait for it. Higher is better; `overlap_comm` and larger buckets raise it.",
        queries=(
            Query(
                f"clamp_min(1 - {by('sum', of_run(recorded.EXPOSED_RATIO))}"
                f" / {by('sum', of_run(recorded.COMM_RATIO))}, 0)",
                "hidden",
            ),
        ),
        unit=RATIO,
        thresholds=PLAIN_TEXT,
        decimals=0,
    ),
    Stat(
        title="Volume over the minimum",
        description="Bytes sent in a step over the minimum that this ZeRO stage needs. 1 is ideal; "
        "`zerowatch estimate` names the setting that causes the excess.",
        queries=(Query(of_run(recorded.VOLUME_RATIO), "ratio"),),
        unit=PLAIN,
        thresholds=PLAIN_TEXT,
        decimals=2,
        empty="no plan for this run",
    ),
    Stat(
        title="Link bandwidth over its best",
        description="Current bandwidth of the worst rank over the best that this link sustained. A "
        "low value means that the network is shared, throttled or failing over.",
        queries=(Query(by("min", of_ranks(recorded.LINK_BANDWIDTH_RATIO)), "of best"),),
        unit=RATIO,
        thresholds=below(LINK_BANDWIDTH_LOW * 1.5, LINK_BANDWIDTH_LOW),
        decimals=0,
    ),
)

COST = (
    TimeSeries(
        title="Communication share of training time",
        description="**Exposed** is the part that training waits for. **all** also counts "
        "communication that overlaps with computation. An alert fires if both exposed means are "
        "above the line.",
        queries=(
            Query(of_run(recorded.EXPOSED_RATIO), "exposed, 5 minutes"),
            Query(of_run(recorded.EXPOSED_RATIO_LONG), "exposed, 30 minutes"),
            Query(of_run(recorded.COMM_RATIO), "all"),
        ),
        unit=RATIO,
        minimum=0,
        thresholds=above(COMM_RATIO_HIGH),
    ),
    TimeSeries(
        title="Causes of exposed communication",
        description="Exposed time by cause. **imbalance**: a rank is slow, see below. **latency**: "
        "there are too many small calls; enlarge buckets. **redundancy**: more is sent than "
        "needed; see `zerowatch estimate`. **bandwidth**: the link is the limit; compress, "
        "accumulate or overlap.",
        queries=(Query(of_run(recorded.CAUSE_RATIO), "{{cause}}"),),
        unit=RATIO,
        minimum=0,
        stacked=True,
        colors=CAUSES,
    ),
)

WAITS = (
    TimeSeries(
        title="Ranks that wait least",
        description="Share of training time spent waiting inside collectives, for the ranks that "
        "wait **least**. The other ranks wait for the rank at the bottom.",
        queries=(
            Query(worst(recorded.WAIT_RATIO_BY_RANK, lowest=True), "rank {{rank}}"),
            Query(by("max", of_ranks(recorded.WAIT_RATIO_BY_RANK)), "longest of all"),
        ),
        unit=RATIO,
        minimum=0,
    ),
    TimeSeries(
        title="Exposed communication of the worst ranks",
        description="If a few ranks stand out, check their nodes and links. If all ranks are "
        "alike, they share the cause.",
        queries=(Query(worst(recorded.EXPOSED_RATIO_BY_RANK), "rank {{rank}}"),),
        unit=RATIO,
        minimum=0,
        thresholds=above(COMM_RATIO_HIGH),
    ),
    TimeSeries(
        title="Straggler score of the worst ranks",
        description="How far a rank is behind the median rank, as a share of a step, without "
        "blocked communication. The log names a rank that is above the line twice in a row.",
        queries=(Query(worst(recorded.STRAGGLER_SCORE, also="phase"), "rank {{rank}} {{phase}}"),),
        unit=RATIO,
        minimum=0,
        thresholds=above(STRAGGLER_SCORE_HIGH),
        width=14,
    ),
    Table(
        title="Stragglers now",
        description="The phase shows where to look. **data**: the loader and the disk. **forward** "
        "and **backward**: the device, its clock and other processes on it.",
        labels={"rank": "Rank", "phase": "Phase"},
        columns=(
            Column(
                title="Behind",
                expression=f"topk(10, {SCORES})",
                unit=RATIO,
                thresholds=above(STRAGGLER_SCORE_HIGH),
                decimals=1,
            ),
        ),
        sort_by="Behind",
        empty="ranks were not compared yet",
        width=10,
    ),
)


TRUST = (
    *sized(
        4,
        7,
        Stat(
            title="Coverage",
            description=(
                f"Recorded collectives over all collectives. Below {COMM_COVERAGE_LOW:.0%} the "
                "figures on this dashboard are incomplete. zerowatch does not see collectives that "
                "C++ code issues."
            ),
            queries=(Query(of_run(recorded.COVERAGE), "coverage"),),
            unit=RATIO,
            thresholds=below(COMM_COVERAGE_LOW),
            decimals=1,
        ),
        Stat(
            title="Collective mismatches",
            description="How often ranks issued different collectives, since the start. A mismatch "
            "is a bug in the script that ends in a hang. The log names the rank and the call.",
            queries=(Query(total(comm.COLLECTIVE_MISMATCHES), "mismatches", shape="now"),),
            unit=PLAIN,
            thresholds=ANY_IS_BAD,
            plain=True,
        ),
        Stat(
            title="Hangs",
            description="How often a rank made no progress, since the start. hang-rank-*.txt in "
            "the run folder shows where it hung.",
            queries=(Query(total(comm.HANGS), "hangs", shape="now"),),
            unit=PLAIN,
            thresholds=ANY_IS_BAD,
            plain=True,
        ),
    ),
    TimeSeries(
        title="Exposed communication by group",
        description="The kind of parallelism that training waits for: dp data, tp tensor, pp "
        "pipeline, ep expert, sp sequence.",
        queries=(Query(of_run(recorded.EXPOSED_RATIO_BY_GROUP), "{{group}}"),),
        unit=RATIO,
        minimum=0,
        stacked=True,
        width=12,
        height=7,
    ),
)

DASHBOARD = Dashboard(
    name="communication",
    title="Communication",
    description="What does communication cost, why, and which ranks are late?",
    rows=(
        Row("At a glance", AT_A_GLANCE),
        Row("Cost and cause", COST),
        Row("Waiting ranks and stragglers", WAITS),
        Row("The link", LINK),
        Row("Pattern and volume", PATTERN),
        Row("Groups and faults", TRUST),
    ),
)
