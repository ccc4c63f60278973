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
from ..grafana.panels import (
    BYTES,
    BYTES_PER_SECOND,
    COUNT,
    PLAIN,
    PLAIN_TEXT,
    RATIO,
    SECONDS,
    BarGauge,
    Column,
    Heatmap,
    Query,
    Stat,
    TimeSeries,
    above,
    below,
)
from ..promql import by
from .queries import of_ranks, of_run, quantile, total, worst
from .shared_panels import fault_count, rank_table, sized

CAUSE_COLORS = {
    "imbalance": "orange",
    "latency": "yellow",
    "redundancy": "purple",
    "bandwidth": "blue",
}
STEP_BYTES_COLORS = {"measured": "blue", "predicted": "yellow", "least": "green"}

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
        colors=CAUSE_COLORS,
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
    rank_table(
        title="Stragglers now",
        description="The phase shows where to look. **data**: the loader and the disk. **forward** "
        "and **backward**: the device, its clock and other processes on it.",
        labels=("rank", "phase"),
        columns=(
            Column(
                title="Behind",
                expression=by("max", of_ranks(recorded.STRAGGLER_SCORE), "rank", "phase"),
                unit=RATIO,
                thresholds=above(STRAGGLER_SCORE_HIGH),
                decimals=1,
            ),
        ),
        empty="ranks were not compared yet",
        width=10,
    ),
)

LINK = (
    *sized(
        8,
        8,
        TimeSeries(
            title="Bandwidth by operation",
            description="Wire bytes over transfer time of recent collectives, for the slowest "
            "rank. Compare it with the link's rated bandwidth: 10 Gbit/s are 1.16 GiB/s.",
            queries=(Query(of_run(recorded.BUS_BANDWIDTH), "{{op}} {{group}}"),),
            unit=BYTES_PER_SECOND,
            minimum=0,
        ),
        TimeSeries(
            title="Bandwidth of the link",
            description="Estimated from collectives of several sizes: the slowest rank now, and "
            "the best that any rank sustained. A growing gap means that the link became slower.",
            queries=(
                Query(of_run(recorded.LINK_BANDWIDTH), "{{group}} now"),
                Query(of_run(recorded.LINK_BEST_BANDWIDTH), "{{group}} best"),
            ),
            unit=BYTES_PER_SECOND,
            minimum=0,
        ),
        TimeSeries(
            title="Latency of the link",
            description="Cost of a call regardless of its size, for the slowest rank. Multiplied "
            "by the calls of a step, it is the time that larger buckets can save.",
            queries=(Query(of_run(recorded.LINK_LATENCY), "{{group}}"),),
            unit=SECONDS,
            minimum=0,
        ),
    ),
    TimeSeries(
        title="Links furthest below their best",
        description="Bandwidth over the best of the same rank and group. Below the line, check "
        "that node's network and who shares it.",
        queries=(
            Query(
                worst(recorded.LINK_BANDWIDTH_RATIO, lowest=True, also="group"),
                "rank {{rank}} {{group}}",
            ),
        ),
        unit=RATIO,
        minimum=0,
        thresholds=below(LINK_BANDWIDTH_LOW),
    ),
    TimeSeries(
        title="Collective duration, 95th percentile",
        description="From issue to completion, including waiting, over all ranks. The buckets are "
        "wide: read it as an order of magnitude.",
        queries=(Query(quantile(0.95, recorded.COLLECTIVE_BUCKETS, "op"), "{{op}}"),),
        unit=SECONDS,
        log_scale=True,
    ),
)

PATTERN = (
    *sized(
        8,
        8,
        BarGauge(
            title="Collectives in a step, by operation",
            description="Calls of one rank in a step. If there are hundreds of small ones, enlarge "
            "`reduce_bucket_size`. If you expect reduce_scatter and see all_reduce, `zerowatch "
            "estimate` explains why.",
            queries=(Query(of_run(recorded.CALLS_PER_STEP), "{{op}}", shape="now"),),
            unit=COUNT,
            minimum=0,
            decimals=1,
            thresholds=PLAIN_TEXT,
        ),
        TimeSeries(
            title="Sent in a step, by operation",
            description="Bytes that one rank sends in a step, by operation and group of ranks. "
            "Compression or another ZeRO stage helps most for the largest.",
            queries=(Query(of_run(recorded.WIRE_BYTES_PER_STEP), "{{op}} {{group}}"),),
            unit=BYTES,
            minimum=0,
            stacked=True,
        ),
        TimeSeries(
            title="Bytes of a step on the wire",
            description="Measured bytes, bytes predicted from the configuration, and the least "
            "that this ZeRO stage needs. If measured is above predicted, other code communicates "
            "too.",
            queries=(Query(of_run(recorded.STEP_WIRE_BYTES), "{{kind}}"),),
            unit=BYTES,
            minimum=0,
            colors=STEP_BYTES_COLORS,
            empty="no plan for this run",
        ),
    ),
    TimeSeries(
        title="Payload of a step, by operation",
        description="Bytes that one rank's collectives move, by the convention of nccl-tests. The "
        "bytes on the wire differ by the algorithm's factor.",
        queries=(Query(of_run(recorded.PAYLOAD_BYTES_PER_STEP), "{{op}} {{group}}"),),
        unit=BYTES,
        minimum=0,
    ),
    Heatmap(
        title="Collective durations",
        description="Brighter means more calls per second. A second band of long durations means "
        "that calls wait; the rows above show for which rank.",
        queries=(Query(by("sum", of_run(recorded.COLLECTIVE_BUCKETS), "le"), "{{le}}", "buckets"),),
        unit=SECONDS,
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
        fault_count(
            title="Collective mismatches",
            description="How often ranks issued different collectives, since the start. A mismatch "
            "is a bug in the script that ends in a hang. The log names the rank and the call.",
            expression=total(comm.COLLECTIVE_MISMATCHES),
            legend="mismatches",
        ),
        fault_count(
            title="Hangs",
            description="How often a rank made no progress, since the start. hang-rank-*.txt in "
            "the run folder shows where it hung.",
            expression=total(comm.HANGS),
            legend="hangs",
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
