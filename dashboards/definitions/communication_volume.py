"""The rows of the dashboard Communication on the link, and on the volume sent over it."""

from __future__ import annotations

from ...metrics.thresholds import (
    LINK_BANDWIDTH_LOW,
)
from .. import recording_rules as recorded
from ..grafana.panels import BarGauge, Heatmap, TimeSeries
from ..grafana.style import (
    BYTES,
    BYTES_PER_SECOND,
    COUNT,
    PLAIN_TEXT,
    RATIO,
    SECONDS,
    Query,
    below,
)
from ..promql import by
from .palette import BYTES_OF_A_STEP
from .parts import sized
from .queries import of_run, quantile, worst

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
            colors=BYTES_OF_A_STEP,
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
