"""Collectives, and the time that a step spends on them.

Definitions of payload, wire bytes, comm, exposed, wait and causes: ARCHITECTURE.md, glossary.
"""

from __future__ import annotations

from .labels import CAUSE, COMPARED_PHASES, GROUP, OP, PHASE
from .spec import Label, counter, gauge, histogram

UNVERIFIED = "(NCCL: not yet verified)"

COLLECTIVE_CALLS = counter(
    "collective_calls_total", "Collective operations issued by this rank.", OP, GROUP, PHASE
)
COLLECTIVE_BYTES = counter(
    "collective_bytes_total", "Payload bytes of collectives, by nccl-tests' convention.", OP, GROUP
)
COLLECTIVE_WIRE_BYTES = counter(
    "collective_wire_bytes_total",
    "Bytes this rank sent for collectives, by the backend's algorithm.",
    OP,
    GROUP,
)
COLLECTIVE_SECONDS = histogram(
    "collective_seconds",
    f"Duration of collectives from issue to completion {UNVERIFIED}.",
    (0.0001, 0.0005, 0.002, 0.01, 0.05, 0.25, 2.0),
    OP,
)
COMM_SECONDS = counter(
    "comm_seconds_total",
    f"Seconds during which a collective was under way, as a union {UNVERIFIED}.",
    GROUP,
)
COMM_EXPOSED_SECONDS = counter(
    "comm_exposed_seconds_total",
    "Seconds in which training could do nothing but wait for collectives; renewed with their "
    f"causes, some seconds after comm_seconds {UNVERIFIED}.",
    GROUP,
)
COMM_WAIT_SECONDS = counter(
    "comm_wait_seconds_total",
    f"Seconds of compared collectives spent waiting for a later rank {UNVERIFIED}.",
    GROUP,
)
COMM_TRANSFER_SECONDS = counter(
    "comm_transfer_seconds_total",
    f"Seconds of compared collectives spent moving data {UNVERIFIED}.",
    GROUP,
)
COMM_CAUSE_SECONDS = counter(
    "comm_cause_seconds_total",
    "Exposed seconds of compared collectives by root cause: imbalance (a later rank), latency (the "
    "price of a call), redundancy (a perfect pattern would not have sent it: see comm_volume_ratio "
    f"and `zerowatch estimate`), bandwidth (the rest) {UNVERIFIED}.",
    CAUSE,
)
COMM_BUS_BANDWIDTH = gauge(
    "comm_bus_bandwidth_bytes_per_second",
    f"Wire bytes over transfer time of the last collectives {UNVERIFIED}.",
    OP,
    GROUP,
)
COMM_LINK_LATENCY = gauge(
    "comm_link_latency_seconds",
    f"Base latency of a collective on this group, estimated from recent ones {UNVERIFIED}.",
    GROUP,
)
COMM_LINK_BANDWIDTH = gauge(
    "comm_link_bandwidth_bytes_per_second",
    f"Bandwidth on this group, estimated from recent collectives of several sizes {UNVERIFIED}.",
    GROUP,
)
COMM_LINK_BEST_BANDWIDTH = gauge(
    "comm_link_best_bandwidth_bytes_per_second",
    f"Highest bandwidth kept up over three exchanges since the start {UNVERIFIED}.",
    GROUP,
)
COMM_EXPOSED_ERROR_RATIO = gauge(
    "comm_exposed_error_ratio",
    "Disagreement on exposed seconds between us and the profiler, over the profiled step's time.",
)
STEP_TIME_RATIO = gauge(
    "step_time_ratio",
    "Shares of the last profiled step: only computing, only communicating, both, neither.",
    Label(name="part", values=("compute", "comm", "overlap", "idle")),
)
COMM_STEP_WIRE_BYTES = gauge(
    "comm_step_wire_bytes",
    "Wire bytes of a step: measured, predicted from the configuration, and the least its ZeRO "
    "stage needs.",
    Label(name="kind", values=("measured", "predicted", "least")),
)
STRAGGLER_SCORE = gauge(
    "straggler_score_ratio",
    "Time by which this rank is slower in a phase than the median rank, over the median step; "
    f"blocked communication left out; not on CUDA {UNVERIFIED}.",
    Label(name="phase", values=COMPARED_PHASES),
)
COMM_VOLUME_RATIO = gauge(
    "comm_volume_ratio",
    "Wire bytes of a step over the least this ZeRO stage needs; `zerowatch estimate` says why.",
)
COMM_COVERAGE_RATIO = gauge(
    "comm_coverage_ratio",
    "Collectives recorded over collectives the process groups counted; "
    "under 0.99 do not trust the comm metrics.",
)
COLLECTIVE_MISMATCHES = counter(
    "collective_mismatches_total", "Times the ranks' collective sequences were seen to differ."
)
EXCHANGE_FAILURES = counter(
    "exchange_failures_total",
    "Exchanges between ranks that failed: the store did not answer, a peer did not report in time, "
    "or collectives could not be matched.",
    Label(name="reason", values=("store", "peer", "unmatched")),
)
PEER_HEARTBEAT_AGE = gauge(
    "peer_heartbeat_age_seconds",
    "Seconds since the peer that was silent longest last reported; up to "
    "cross_rank.interval_seconds plus 4 s is normal.",
)
HANGS = counter(
    "hangs_total",
    "Times this rank made no progress for longer than hang.seconds and ten median steps.",
)

METRICS = (
    COLLECTIVE_CALLS,
    COLLECTIVE_BYTES,
    COLLECTIVE_WIRE_BYTES,
    COLLECTIVE_SECONDS,
    COMM_SECONDS,
    COMM_EXPOSED_SECONDS,
    COMM_WAIT_SECONDS,
    COMM_TRANSFER_SECONDS,
    COMM_CAUSE_SECONDS,
    COMM_BUS_BANDWIDTH,
    COMM_VOLUME_RATIO,
    COMM_COVERAGE_RATIO,
    COLLECTIVE_MISMATCHES,
    COMM_LINK_LATENCY,
    COMM_LINK_BANDWIDTH,
    COMM_LINK_BEST_BANDWIDTH,
    COMM_EXPOSED_ERROR_RATIO,
    STEP_TIME_RATIO,
    COMM_STEP_WIRE_BYTES,
    STRAGGLER_SCORE,
    EXCHANGE_FAILURES,
    PEER_HEARTBEAT_AGE,
    HANGS,
)
