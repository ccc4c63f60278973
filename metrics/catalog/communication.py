"""Collectives, and the time that a step spends on them.

Definitions of payload, wire bytes, comm, exposed, wait and causes: ARCHITECTURE.md, glossary.
"""

from __future__ import annotations

from .labels import CAUSE, GROUP, OP, PHASE
from .spec import counter, gauge, histogram

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
    f"Seconds in which training could do nothing but wait for collectives {UNVERIFIED}.",
    GROUP,
)
COMM_WAIT_SECONDS = counter(
    "comm_wait_seconds_total",
    f"Seconds of collectives spent waiting for a later rank {UNVERIFIED}.",
    GROUP,
)
COMM_TRANSFER_SECONDS = counter(
    "comm_transfer_seconds_total",
    f"Seconds of collectives spent moving data {UNVERIFIED}.",
    GROUP,
)
COMM_CAUSE_SECONDS = counter(
    "comm_cause_seconds_total", f"Exposed seconds by root cause {UNVERIFIED}.", CAUSE
)
COMM_BUS_BANDWIDTH = gauge(
    "comm_bus_bandwidth_bytes_per_second",
    f"Wire bytes over transfer time of the last collectives {UNVERIFIED}.",
    OP,
    GROUP,
)
COMM_VOLUME_RATIO = gauge(
    "comm_volume_ratio", "Wire bytes of a step over the least this ZeRO stage needs."
)
COMM_COVERAGE_RATIO = gauge(
    "comm_coverage_ratio",
    "Collectives recorded over collectives the process groups counted; "
    "under 0.99 do not trust the comm metrics.",
)
COLLECTIVE_MISMATCHES = counter(
    "collective_mismatches_total", "Times the ranks' collective sequences were seen to differ."
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
)
