"""The dashboard Communication: cost and causes of communication, stragglers, links, volume."""

from __future__ import annotations

from ...metrics.catalog import communication as comm
from ...metrics.thresholds import (
    COMM_COVERAGE_LOW,
    EXPOSED_COMM_RATIO_HIGH,
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
from .queries import RANK, limit, of_ranks, of_run, quantile, total, worst
from .shared_panels import RANK_LEGEND, fault_count, heatmaps, rank_table, sized

CAUSE_COLORS = {
    "imbalance": "orange",
    "latency": "yellow",
    "redundancy": "purple",
    "bandwidth": "blue",
}
NO_ESTIMATE = "no estimate, or not served"
STEP_BYTES_COLORS = {"measured": "blue", "predicted": "yellow", "reference": "green"}

AT_A_GLANCE = sized(
    6,
    5,
    Stat(
        title="Exposed communication",
        description="Share of training time in which training only waits for communication. Below "
        f"{EXPOSED_COMM_RATIO_HIGH:.0%} there is little to gain. Above, see the causes below.",
        queries=(Query(of_run(recorded.EXPOSED_RATIO), "exposed"),),
        unit=RATIO,
        thresholds=above(EXPOSED_COMM_RATIO_HIGH / 2, EXPOSED_COMM_RATIO_HIGH),
        decimals=1,
    ),
    Stat(
        title="Overlapped communication",
        description="Share of communication time that overlaps with computation, so that training "
        "does not wait for it. Higher is better; `overlap_comm` and larger buckets increase it. On "
        "GPUs most asynchronous communication counts until training has waited for it. "
        "Communication of evaluations and checkpoints counts as overlapped.",
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
        description="Bytes sent in a step, divided by the minimum that this ZeRO stage needs. 1 is "
        "ideal; if it is higher, `zerowatch estimate` names the setting that causes the excess.",
        queries=(Query(of_run(recorded.VOLUME_RATIO), "ratio"),),
        unit=PLAIN,
        thresholds=PLAIN_TEXT,
        decimals=2,
        empty=NO_ESTIMATE,
    ),
    Stat(
        title="Link bandwidth over the usual",
        description="Current bandwidth of the worst rank, divided by the usual one of the last six "
        "hours; 100% is at or above it. A low value means that the network is shared, throttled or "
        "failing over. If it stays so, it becomes the usual one.",
        queries=(Query(by("min", of_ranks(recorded.LINK_BANDWIDTH_RATIO)), "of the usual"),),
        unit=RATIO,
        thresholds=below(LINK_BANDWIDTH_LOW * 1.5, LINK_BANDWIDTH_LOW),
        decimals=0,
    ),
)

COST = (
    TimeSeries(
        title="Communication share of training time",
        description="**exposed** is the share of training time in which training waits for "
        "communication. **all** also counts communication that overlaps with computation; on GPUs, "
        "most of it counts until training has waited for it. An alert fires if both exposed means "
        "are above the line.",
        queries=(
            Query(of_run(recorded.EXPOSED_RATIO), "exposed, 5 minutes"),
            Query(of_run(recorded.EXPOSED_RATIO_LONG), "exposed, 30 minutes"),
            Query(of_run(recorded.COMM_RATIO), "all"),
            limit(EXPOSED_COMM_RATIO_HIGH),
        ),
        unit=RATIO,
        minimum=0,
    ),
    TimeSeries(
        title="Causes of exposed communication",
        description="Exposed communication as a share of training time, by cause. **imbalance**: a "
        "rank is slow; see the stragglers below. **latency**: there are too many small calls; "
        "enlarge the buckets. **redundancy**: more bytes are sent than needed; see `zerowatch "
        "estimate`. **bandwidth**: the link is the limit; compress, accumulate more or overlap.",
        queries=(Query(of_run(recorded.CAUSE_RATIO), "{{cause}}"),),
        unit=RATIO,
        minimum=0,
        stacked=True,
        colors=CAUSE_COLORS,
    ),
)

WAITING_AND_STRAGGLERS = (
    TimeSeries(
        title="Ranks that wait least",
        description="Share of training time spent waiting inside collectives, for the ranks that "
        "wait **least**, and the longest of all. The other ranks wait for the rank with the lowest "
        "line.",
        queries=(
            Query(worst(recorded.WAIT_RATIO_BY_RANK, lowest=True), RANK_LEGEND),
            Query(by("max", of_ranks(recorded.WAIT_RATIO_BY_RANK)), "longest of all"),
        ),
        unit=RATIO,
        minimum=0,
    ),
    TimeSeries(
        title="Exposed communication of the worst ranks",
        description="Share of training time in which a rank only waits for communication, for the "
        "worst ranks. If a few ranks stand out, check their nodes and links. If all ranks are "
        "alike, the cause is common to them.",
        queries=(
            Query(worst(recorded.EXPOSED_RATIO_BY_RANK), RANK_LEGEND),
            limit(EXPOSED_COMM_RATIO_HIGH),
        ),
        unit=RATIO,
        minimum=0,
    ),
    TimeSeries(
        title="Straggler score of the worst ranks",
        description="Time by which a rank is slower than the median rank, as a share of a step, "
        "without time blocked in communication. A rank above the line twice in a row, and by more "
        "than the ranks usually differ, is named in the log; check its host.",
        queries=(
            Query(worst(recorded.STRAGGLER_SCORE, also="phase"), f"{RANK_LEGEND} {{{{phase}}}}"),
            limit(STRAGGLER_SCORE_HIGH),
        ),
        unit=RATIO,
        minimum=0,
        width=14,
    ),
    rank_table(
        title="Stragglers now",
        description="The ranks that are slowest now, and the phase that shows where to look. "
        "**data**: the loader and the disk. **forward** and **backward**: the device, its clock "
        "and other processes on it. **other**: code of the script between the passes.",
        labels=(*RANK, "phase"),
        columns=(
            Column(
                title="Behind",
                expression=by("max", of_ranks(recorded.STRAGGLER_SCORE), *RANK, "phase"),
                unit=RATIO,
                thresholds=above(STRAGGLER_SCORE_HIGH),
                decimals=1,
            ),
        ),
        empty="ranks were not compared yet",
        width=10,
    ),
)

OVER_TIME = (
    *heatmaps(
        recorded.WAIT_RATIO_BY_RANK,
        title="Waiting in collectives",
        description="Share of training time spent waiting inside collectives for other ranks. The "
        "**bright** rows wait least: the others wait for them. Bright rows of one node: look at "
        "that node.",
        operation="min",
        low_is_bad=True,
        unit=RATIO,
        minimum=0,
    ),
    *heatmaps(
        recorded.EXPOSED_RATIO_BY_RANK,
        title="Exposed communication",
        description="Share of training time in which a rank only waits for communication; brighter "
        "is more. All rows bright: the cause is common to all. Single bright rows: check the "
        "links of their nodes.",
        unit=RATIO,
        minimum=0,
    ),
)

LINK = (
    *sized(
        8,
        8,
        TimeSeries(
            title="Bandwidth by operation",
            description="Bytes per second that recent collectives sent while they transferred, for "
            "the slowest rank. Compare it with the rated bandwidth of the link: 10 Gbit/s are 1.16 "
            "GiB/s.",
            queries=(Query(of_run(recorded.BUS_BANDWIDTH), "{{op}} {{group}}"),),
            unit=BYTES_PER_SECOND,
            minimum=0,
        ),
        TimeSeries(
            title="Bandwidth of the link",
            description="Bytes per second of the link, estimated from collectives of several "
            "sizes: the slowest rank now, and the best that any rank sustained over three "
            "estimates, which a single one may exceed. A growing gap means that the link became "
            "slower.",
            queries=(
                Query(of_run(recorded.LINK_BANDWIDTH), "{{group}} now"),
                Query(of_run(recorded.LINK_BEST_BANDWIDTH), "{{group}} best"),
            ),
            unit=BYTES_PER_SECOND,
            minimum=0,
        ),
        TimeSeries(
            title="Latency of the link",
            description="Fixed time of a collective regardless of its size, for the slowest rank. "
            "Multiplied by the number of calls in a step, it is the time that larger buckets can "
            "save.",
            queries=(Query(of_run(recorded.LINK_LATENCY), "{{group}}"),),
            unit=SECONDS,
            minimum=0,
        ),
    ),
    TimeSeries(
        title="Links furthest below their usual bandwidth",
        description="Bandwidth of a link divided by its usual one of the last six hours, by rank "
        "and group; 100% is at or above it. Below the line, check the network of that node and who "
        "shares it.",
        queries=(
            Query(
                worst(recorded.LINK_BANDWIDTH_RATIO, lowest=True, also="group"),
                f"{RANK_LEGEND} {{{{group}}}}",
            ),
            limit(LINK_BANDWIDTH_LOW),
        ),
        unit=RATIO,
        minimum=0,
    ),
    TimeSeries(
        title="Collective duration, 95th percentile",
        description="Time from issue to completion, including waiting, that 95% of the collectives "
        "of all ranks do not exceed. The buckets are wide: read it as an order of magnitude. If it "
        "rises, see which ranks wait. On GPUs, asynchronous ones count in sampled steps only.",
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
            description="Number of collectives that one rank issues in a step. If there are "
            "hundreds of small ones, enlarge `reduce_bucket_size`. If you expect reduce_scatter "
            "and see all_reduce, `zerowatch estimate` explains why.",
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
            description="Bytes that a rank sends in a step: measured, predicted from the "
            "configuration, and the `reference` for its ZeRO stage, the volume in the ZeRO paper. "
            "If measured is above predicted, other code communicates too.",
            queries=(Query(of_run(recorded.STEP_WIRE_BYTES), "{{kind}}"),),
            unit=BYTES,
            minimum=0,
            colors=STEP_BYTES_COLORS,
            empty=NO_ESTIMATE,
        ),
    ),
    TimeSeries(
        title="Payload of a step, by operation",
        description="Bytes that the collectives of one rank move in a step, by the convention of "
        "nccl-tests. The bytes on the wire differ by a factor that depends on the algorithm.",
        queries=(Query(of_run(recorded.PAYLOAD_BYTES_PER_STEP), "{{op}} {{group}}"),),
        unit=BYTES,
        minimum=0,
    ),
    Heatmap(
        title="Collective durations",
        description="Collectives per second by their duration; brighter cells have more. A second "
        "band of long durations means that calls wait; the rows above show for which rank.",
        queries=(Query(by("sum", of_run(recorded.COLLECTIVE_BUCKETS), "le"), "{{le}}", "buckets"),),
        unit=SECONDS,
    ),
)

GROUPS_AND_FAULTS = (
    *sized(
        4,
        7,
        Stat(
            title="Coverage",
            description="Recorded collectives divided by all collectives. Below "
            f"{COMM_COVERAGE_LOW:.0%} the figures on this dashboard are incomplete. zerowatch does "
            "not see collectives that C++ code issues or that CUDA graphs replay.",
            queries=(Query(of_run(recorded.COVERAGE), "coverage"),),
            unit=RATIO,
            thresholds=below(COMM_COVERAGE_LOW),
            decimals=1,
        ),
        fault_count(
            title="Collective mismatches",
            description="How often ranks issued different collectives since the start. It should "
            "be 0: a mismatch is a bug in the script and ends in a hang. The log names the rank "
            "and the call.",
            expression=total(comm.COLLECTIVE_MISMATCHES),
            legend="mismatches",
        ),
        fault_count(
            title="Hangs",
            description="How often a rank made no progress since the start. It should be 0; "
            "hang-rank-*.txt in the run folder shows where the rank hung.",
            expression=total(comm.HANGS),
            legend="hangs",
        ),
    ),
    TimeSeries(
        title="Exposed communication by group",
        description="Exposed communication as a share of training time, by the kind of parallelism "
        "that training waits for: dp is data, tp tensor, pp pipeline, ep expert and sp sequence "
        "parallelism. Reduce the largest first.",
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
        Row("Waiting ranks and stragglers", WAITING_AND_STRAGGLERS),
        Row("Nodes and ranks over time", OVER_TIME, collapsed=True),
        Row("The link", LINK, collapsed=True),
        Row("Pattern and volume", PATTERN, collapsed=True),
        Row("Groups and faults", GROUPS_AND_FAULTS, collapsed=True),
    ),
)
