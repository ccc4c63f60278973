"""What does communication cost, and why?"""

from __future__ import annotations

from ...metrics.catalog import communication as comm
from ...metrics.thresholds import (
    COMM_COVERAGE_LOW,
    COMM_RATIO_HIGH,
    LINK_BANDWIDTH_LOW,
    STRAGGLER_SCORE_HIGH,
)
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
from ..recording import communication
from .communication_volume import LINK, PATTERN
from .palette import CAUSES
from .parts import sized
from .queries import of_ranks, of_run, total, worst

SCORES = by("max", of_ranks(communication.STRAGGLER_SCORE), "rank", "phase")

AT_A_GLANCE = sized(
    6,
    5,
    Stat(
        title="Training waits",
        description="Share of training time in which nothing but communication went on. Under 20 "
        "% there is little to win.",
        queries=(Query(of_run(communication.EXPOSED_RATIO), "exposed"),),
        unit=RATIO,
        thresholds=above(COMM_RATIO_HIGH / 2, COMM_RATIO_HIGH),
        decimals=1,
    ),
    Stat(
        title="Hidden behind computing",
        description="Share of communication that training does not wait for. More is better; "
        "`overlap_comm` and larger buckets raise it.",
        queries=(
            Query(
                f"clamp_min(1 - {by('sum', of_run(communication.EXPOSED_RATIO))}"
                f" / {by('sum', of_run(communication.COMM_RATIO))}, 0)",
                "hidden",
            ),
        ),
        unit=RATIO,
        thresholds=PLAIN_TEXT,
        decimals=0,
    ),
    Stat(
        title="Sent over the least needed",
        description="Bytes of a step over the least that this ZeRO stage needs. 1 is perfect; "
        "`zerowatch estimate` names the setting that costs the rest.",
        queries=(Query(of_run(communication.VOLUME_RATIO), "ratio"),),
        unit=PLAIN,
        thresholds=PLAIN_TEXT,
        decimals=2,
        empty="no plan for this run",
    ),
    Stat(
        title="Link, of its best",
        description="Bandwidth now over the best this link kept up, of the worst rank. Low: the "
        "network is shared, throttled or failing over.",
        queries=(Query(by("min", of_ranks(communication.LINK_BANDWIDTH_RATIO)), "of best"),),
        unit=RATIO,
        thresholds=below(LINK_BANDWIDTH_LOW * 1.5, LINK_BANDWIDTH_LOW),
        decimals=0,
    ),
)

COST = (
    TimeSeries(
        title="Communication, share of training time",
        description="**Exposed** is what training waits for; **all** also counts what goes on "
        "behind computing. If both means of exposed are above the line, an alert fires.",
        queries=(
            Query(of_run(communication.EXPOSED_RATIO), "exposed, 5 minutes"),
            Query(of_run(communication.EXPOSED_RATIO_LONG), "exposed, 30 minutes"),
            Query(of_run(communication.COMM_RATIO), "all"),
        ),
        unit=RATIO,
        minimum=0,
        thresholds=above(COMM_RATIO_HIGH),
    ),
    TimeSeries(
        title="Why training waits",
        description="Exposed time by cause. **imbalance**: a slow rank, see below. **latency**: "
        "too many small calls, enlarge buckets. **redundancy**: more is sent than needed, see "
        "`zerowatch estimate`. **bandwidth**: the link itself; compress, accumulate or overlap.",
        queries=(Query(of_run(communication.CAUSE_RATIO), "{{cause}}"),),
        unit=RATIO,
        minimum=0,
        stacked=True,
        colors=CAUSES,
    ),
)

WAITS = (
    TimeSeries(
        title="Waiting for a later rank: who waits least",
        description="Share of training time spent waiting inside collectives, of the ranks that "
        "wait **least**: the one at the bottom is who the others wait for.",
        queries=(
            Query(worst(communication.WAIT_RATIO_BY_RANK, lowest=True), "rank {{rank}}"),
            Query(by("max", of_ranks(communication.WAIT_RATIO_BY_RANK)), "longest of all"),
        ),
        unit=RATIO,
        minimum=0,
    ),
    TimeSeries(
        title="Exposed communication of the worst ranks",
        description="If a few ranks stand out, look at their node and its links; if all are "
        "alike, the cause is common.",
        queries=(Query(worst(communication.EXPOSED_RATIO_BY_RANK), "rank {{rank}}"),),
        unit=RATIO,
        minimum=0,
        thresholds=above(COMM_RATIO_HIGH),
    ),
    TimeSeries(
        title="Straggler score of the worst ranks",
        description="By how much of a step a rank is slower than the median rank, blocked "
        "communication left out. Above the line twice in a row, the log names the rank.",
        queries=(
            Query(worst(communication.STRAGGLER_SCORE, also="phase"), "rank {{rank}} {{phase}}"),
        ),
        unit=RATIO,
        minimum=0,
        thresholds=above(STRAGGLER_SCORE_HIGH),
        width=14,
    ),
    Table(
        title="Stragglers now",
        description="The phase shows where to look: **data** at the loader and the disk, "
        "**forward** and **backward** at the device, its clock and who else uses it.",
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
            description="Collectives recorded over those that happened. Under 99 % the figures on "
            "this dashboard miss some: collectives issued from C++ are not seen.",
            queries=(Query(of_run(communication.COVERAGE), "coverage"),),
            unit=RATIO,
            thresholds=below(COMM_COVERAGE_LOW),
            decimals=1,
        ),
        Stat(
            title="Sequences that differ",
            description="Times that ranks were seen to issue different collectives, since the "
            "start. Any is a bug in the script that ends in a hang: the log names rank and call.",
            queries=(Query(total(comm.COLLECTIVE_MISMATCHES), "mismatches", shape="now"),),
            unit=PLAIN,
            thresholds=ANY_IS_BAD,
            plain=True,
        ),
        Stat(
            title="Hangs",
            description="Times a rank made no progress, since the start. hang-rank-*.txt in the "
            "run folder says where it stood.",
            queries=(Query(total(comm.HANGS), "hangs", shape="now"),),
            unit=PLAIN,
            thresholds=ANY_IS_BAD,
            plain=True,
        ),
    ),
    TimeSeries(
        title="Exposed, by group of ranks",
        description="Which kind of parallelism training waits for: dp data, tp tensor, pp "
        "pipeline, ep expert, sp sequence.",
        queries=(Query(of_run(communication.EXPOSED_RATIO_BY_GROUP), "{{group}}"),),
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
    description="What does communication cost, why, and who is late?",
    rows=(
        Row("At a glance", AT_A_GLANCE),
        Row("Cost and cause", COST),
        Row("Ranks that wait, and whom they wait for", WAITS),
        Row("The link", LINK),
        Row("Pattern and volume", PATTERN),
        Row("Groups, and what went wrong", TRUST),
    ),
)
