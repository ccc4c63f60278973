"""Of the dashboard Communication the rows on the link, and on what is sent over it."""

from __future__ import annotations

from ...metrics.thresholds import (
    LINK_BANDWIDTH_LOW,
)
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
from ..recording import communication
from .palette import BYTES_OF_A_STEP
from .parts import sized
from .queries import of_run, quantile, worst

LINK = (
    *sized(
        8,
        8,
        TimeSeries(
            title="Bandwidth by operation",
            description="Bytes on the wire over transfer time of recent collectives, of the "
            "slowest rank. Compare with what the link should do: 10 Gbit/s are 1.16 GiB/s.",
            queries=(Query(of_run(communication.BUS_BANDWIDTH), "{{op}} {{group}}"),),
            unit=BYTES_PER_SECOND,
            minimum=0,
        ),
        TimeSeries(
            title="Bandwidth of the link",
            description="Estimated from collectives of several sizes: the slowest rank now, and "
            "the best that any kept up. A gap that opens is a link that got worse.",
            queries=(
                Query(of_run(communication.LINK_BANDWIDTH), "{{group}} now"),
                Query(of_run(communication.LINK_BEST_BANDWIDTH), "{{group}} best"),
            ),
            unit=BYTES_PER_SECOND,
            minimum=0,
        ),
        TimeSeries(
            title="Latency of the link",
            description="What a call costs however small it is, of the slowest rank. Times the "
            "calls of a step it is the time that larger buckets can win.",
            queries=(Query(of_run(communication.LINK_LATENCY), "{{group}}"),),
            unit=SECONDS,
            minimum=0,
        ),
    ),
    TimeSeries(
        title="Links furthest under their best",
        description="Bandwidth over the best of the same rank and group. Under the line: look at "
        "that node's network and at who shares it.",
        queries=(
            Query(
                worst(communication.LINK_BANDWIDTH_RATIO, lowest=True, also="group"),
                "rank {{rank}} {{group}}",
            ),
        ),
        unit=RATIO,
        minimum=0,
        thresholds=below(LINK_BANDWIDTH_LOW),
    ),
    TimeSeries(
        title="How long a collective takes, 95th percentile",
        description="From issue to completion, waiting included, over all ranks. The buckets are "
        "wide: read it as an order of magnitude.",
        queries=(Query(quantile(0.95, communication.COLLECTIVE_BUCKETS, "op"), "{{op}}"),),
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
            description="Calls of one rank in a step. Hundreds of small ones: enlarge "
            "`reduce_bucket_size`. An all_reduce where you expect "
            "reduce_scatter: `zerowatch estimate` says why.",
            queries=(Query(of_run(communication.CALLS_PER_STEP), "{{op}}", shape="now"),),
            unit=COUNT,
            minimum=0,
            decimals=1,
            thresholds=PLAIN_TEXT,
        ),
        TimeSeries(
            title="Sent in a step, by operation",
            description="Bytes that one rank puts on the wire in a step, by operation and group "
            "of ranks. The largest is where compression or another ZeRO stage helps most.",
            queries=(Query(of_run(communication.WIRE_BYTES_PER_STEP), "{{op}} {{group}}"),),
            unit=BYTES,
            minimum=0,
            stacked=True,
        ),
        TimeSeries(
            title="Bytes of a step on the wire",
            description="What was sent, what the configuration lets expect, and the least this "
            "ZeRO stage needs. Measured above predicted: something else communicates too.",
            queries=(Query(of_run(communication.STEP_WIRE_BYTES), "{{kind}}"),),
            unit=BYTES,
            minimum=0,
            colors=BYTES_OF_A_STEP,
            empty="no plan for this run",
        ),
    ),
    TimeSeries(
        title="Payload of a step, by operation",
        description="Bytes that one rank's collectives were asked to move, by nccl-tests' "
        "convention; what goes over the wire differs by the algorithm's factor.",
        queries=(Query(of_run(communication.PAYLOAD_BYTES_PER_STEP), "{{op}} {{group}}"),),
        unit=BYTES,
        minimum=0,
    ),
    Heatmap(
        title="Collectives: how many of which duration",
        description="Brighter is more calls a second. A second band high up is calls that wait: "
        "see who is late above.",
        queries=(
            Query(by("sum", of_run(communication.COLLECTIVE_BUCKETS), "le"), "{{le}}", "buckets"),
        ),
        unit=SECONDS,
    ),
)
