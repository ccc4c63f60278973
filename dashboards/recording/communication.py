"""What communication costs, why, and where."""

from __future__ import annotations

from ...metrics.catalog import communication as comm
from ...metrics.catalog import training
from ..promql import by, rate, ratio, select
from .rule import aggregated, recorded, share_of_training, summed_rate

EXPOSED_RATIO = recorded(
    comm.COMM_EXPOSED_SECONDS,
    "ratio_rate5m",
    lambda timing: share_of_training(comm.COMM_EXPOSED_SECONDS, timing.short),
)
EXPOSED_RATIO_LONG = recorded(
    comm.COMM_EXPOSED_SECONDS,
    "ratio_rate30m",
    lambda timing: share_of_training(comm.COMM_EXPOSED_SECONDS, timing.long),
)
EXPOSED_RATIO_BY_RANK = recorded(
    comm.COMM_EXPOSED_SECONDS,
    "ratio_rate5m",
    lambda timing: share_of_training(comm.COMM_EXPOSED_SECONDS, timing.short, per=("rank",)),
    "rank",
)
EXPOSED_RATIO_BY_GROUP = recorded(
    comm.COMM_EXPOSED_SECONDS,
    "ratio_rate5m",
    lambda timing: share_of_training(comm.COMM_EXPOSED_SECONDS, timing.short, "group"),
    "group",
)
COMM_RATIO = recorded(
    comm.COMM_SECONDS,
    "ratio_rate5m",
    lambda timing: share_of_training(comm.COMM_SECONDS, timing.short),
)
CAUSE_RATIO = recorded(
    comm.COMM_CAUSE_SECONDS,
    "ratio_rate5m",
    lambda timing: share_of_training(comm.COMM_CAUSE_SECONDS, timing.short, "cause"),
    "cause",
)
WAIT_RATIO_BY_RANK = recorded(
    comm.COMM_WAIT_SECONDS,
    "ratio_rate5m",
    lambda timing: share_of_training(comm.COMM_WAIT_SECONDS, timing.short, per=("rank",)),
    "rank",
)
CALLS_PER_STEP = recorded(
    comm.COLLECTIVE_CALLS,
    "per_step_rate5m",
    lambda timing: ratio(
        by("sum", rate(comm.COLLECTIVE_CALLS, timing.short), "op"),
        by("sum", rate(training.STEPS, timing.short)),
    ),
    "op",
)
COLLECTIVE_BUCKETS = summed_rate(comm.COLLECTIVE_SECONDS, "op", "le", part="_bucket")
LINK_BANDWIDTH_RATIO = recorded(
    comm.COMM_LINK_BANDWIDTH,
    "best_ratio",
    lambda timing: (
        f"{by('min', select(comm.COMM_LINK_BANDWIDTH), 'rank', 'group')}\n"
        f"/ {by('max', select(comm.COMM_LINK_BEST_BANDWIDTH), 'rank', 'group')}"
    ),
    "rank",
    "group",
)
BUS_BANDWIDTH = aggregated(comm.COMM_BUS_BANDWIDTH, "min", "op", "group")
VOLUME_RATIO = aggregated(comm.COMM_VOLUME_RATIO, "max")
STEP_WIRE_BYTES = aggregated(comm.COMM_STEP_WIRE_BYTES, "max", "kind")
COVERAGE = aggregated(comm.COMM_COVERAGE_RATIO, "min")
STRAGGLER_SCORE = aggregated(comm.STRAGGLER_SCORE, "max", "rank", "phase")

# By the step and not by the second: such a rate rises for five minutes after a start.
WIRE_BYTES_PER_STEP = recorded(
    comm.COLLECTIVE_WIRE_BYTES,
    "per_step_rate5m",
    lambda timing: ratio(
        by("sum", rate(comm.COLLECTIVE_WIRE_BYTES, timing.short), "op", "group"),
        by("sum", rate(training.STEPS, timing.short)),
    ),
    "op",
    "group",
)
PAYLOAD_BYTES_PER_STEP = recorded(
    comm.COLLECTIVE_BYTES,
    "per_step_rate5m",
    lambda timing: ratio(
        by("sum", rate(comm.COLLECTIVE_BYTES, timing.short), "op", "group"),
        by("sum", rate(training.STEPS, timing.short)),
    ),
    "op",
    "group",
)
# For dashboards: of a thousand ranks, as lines over time, the raw series would be too many.
LINK_BANDWIDTH = aggregated(comm.COMM_LINK_BANDWIDTH, "min", "group")
LINK_BEST_BANDWIDTH = aggregated(comm.COMM_LINK_BEST_BANDWIDTH, "max", "group")
LINK_LATENCY = aggregated(comm.COMM_LINK_LATENCY, "max", "group")
HEARTBEAT_AGE = aggregated(comm.PEER_HEARTBEAT_AGE, "max")
EXCHANGE_FAILURES_RATE = summed_rate(comm.EXCHANGE_FAILURES, "reason")

RULES = (
    EXPOSED_RATIO,
    EXPOSED_RATIO_LONG,
    EXPOSED_RATIO_BY_RANK,
    EXPOSED_RATIO_BY_GROUP,
    COMM_RATIO,
    CAUSE_RATIO,
    WAIT_RATIO_BY_RANK,
    CALLS_PER_STEP,
    COLLECTIVE_BUCKETS,
    LINK_BANDWIDTH_RATIO,
    BUS_BANDWIDTH,
    VOLUME_RATIO,
    STEP_WIRE_BYTES,
    COVERAGE,
    STRAGGLER_SCORE,
    WIRE_BYTES_PER_STEP,
    PAYLOAD_BYTES_PER_STEP,
    LINK_BANDWIDTH,
    LINK_BEST_BANDWIDTH,
    LINK_LATENCY,
    HEARTBEAT_AGE,
    EXCHANGE_FAILURES_RATE,
)
