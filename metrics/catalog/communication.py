"""Metrics of communication: collectives, their time in a step, links, stragglers and hangs.

docs/concepts.md defines payload, wire bytes, comm, exposed, wait and causes.
"""

from __future__ import annotations

from ..thresholds import (
    COMM_COVERAGE_LOW,
    EXPOSED_COMM_RATIO_HIGH,
    LINK_BANDWIDTH_LOW,
    STRAGGLER_SCORE_HIGH,
)
from .labels import CAUSE, COMPARED_PHASES, GROUP, OP, PHASE
from .spec import EVERY_SERIES, Label, Lean, counter, gauge, histogram

COLLECTIVE_CALLS = counter(
    "collective_calls_total",
    "Collective operations issued by this rank. Those of the group zerowatch are zerowatch's own "
    "(votes); estimates and comm_volume_ratio do not count them.",
    OP,
    GROUP,
    PHASE,
    usual="The same number in each step. With ZeRO 3 it grows with the number of modules.",
)
COLLECTIVE_BYTES = counter(
    "collective_bytes_total",
    "Payload bytes of collectives, as nccl-tests counts them.",
    OP,
    GROUP,
    usual="The same number in each step.",
)
COLLECTIVE_WIRE_BYTES = counter(
    "collective_wire_bytes_total",
    "Bytes this rank sent for collectives, by the backend's algorithm.",
    OP,
    GROUP,
    usual="In a step, 4 bytes per parameter with ZeRO 0 to 2 and 6 bytes with ZeRO 3, in 16 bits "
    "(ZeRO paper: 2 and 3 elements per parameter).",
)
COLLECTIVE_DURATION = histogram(
    "collective_duration_seconds",
    "Duration of collectives from issue to completion. Asynchronous ones on a GPU count in "
    "sampled steps only (sampling.exact_collectives_steps).",
    (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    OP,
    usual="20 to 100 us for small collectives within a node of NVLink, some ms per 100 MB "
    "between nodes (general figures). Worry about durations that grow at constant "
    "bytes.",
)
COMM_SECONDS = counter(
    "comm_seconds_total",
    "Seconds during which at least one timed collective was in flight. Asynchronous ones on a GPU "
    "are exact in sampled steps (sampling.exact_collectives_steps); in others they count until "
    "training has waited for them, or not at all if it does not. Ones in coalescing blocks and "
    "CUDA graphs do not count.",
    GROUP,
    lean=Lean(without=("group",)),
    usual="Any rate up to 1: communication may overlap with computation. Compare "
    "comm_exposed_seconds_total.",
)
COMM_UNION_SECONDS = counter(
    "comm_union_seconds_total",
    "Like comm_seconds, over all groups: time in which several groups had calls in flight counts "
    "once.",
    lean=EVERY_SERIES,
    usual="At most the sum of comm_seconds_total over groups. Less the exposed seconds, it is what "
    "overlaps with computation in a run without evaluation and checkpoints.",
)
COMM_EXPOSED_SECONDS = counter(
    "comm_exposed_seconds_total",
    "Seconds in which training could do nothing but wait for collectives, without evaluation and "
    "checkpoints; updated together with their causes, some seconds after comm_seconds.",
    GROUP,
    lean=Lean(without=("group",)),
    usual=f"A rate below {EXPOSED_COMM_RATIO_HIGH:g} of training time. ZeRO 3 between nodes "
    "often has 0.2 to 0.4.",
)
COMM_OWN_EXPOSED_SECONDS = counter(
    "comm_own_exposed_seconds_total",
    "The part of comm_exposed_seconds in zerowatch's own collectives, by which the ranks of a "
    "TrainingRun agree, by the phase in which training waited.",
    PHASE,
    usual="A rate below 0.01.",
)
COMM_WAIT_SECONDS = counter(
    "comm_wait_seconds_total",
    "Seconds of collectives spent waiting for a later rank, without evaluation and checkpoints: "
    "measured where the same call was found on all ranks, else estimated from the link. "
    "Asynchronous calls on a GPU are measured in sampled steps (sampling.exact_collectives_steps); "
    "those of other steps count like the mean of the last four, without the first.",
    GROUP,
    lean=Lean(without=("group",)),
    usual="Small and equal on all ranks. The rank that waits least is the one that the others"
    " wait for.",
)
COMM_TRANSFER_SECONDS = counter(
    "comm_transfer_seconds_total",
    "Seconds of collectives spent moving data, without evaluation and checkpoints: their duration "
    "less the wait.",
    GROUP,
    usual="Constant per step. It grows if a link becomes slow.",
)
COMM_CAUSE_SECONDS = counter(
    "comm_cause_seconds_total",
    "Exposed seconds of collectives whose wait is known, by cause: imbalance (another rank was "
    "late, and the rest of exposed time that is no transfer), latency (fixed cost of each call), "
    "redundancy (more bytes than the ZeRO stage needs: see comm_volume_ratio and `zerowatch "
    "estimate`), bandwidth (the rest).",
    CAUSE,
    usual="One cause usually leads: it says what to change first.",
)
COMM_BUS_BANDWIDTH = gauge(
    "comm_bus_bandwidth_bytes_per_second",
    "Wire bytes over transfer time of the last collectives.",
    OP,
    GROUP,
    usual="1e11 to 4e11 with NVLink, 1e10 to 5e10 between nodes with 100 to 400 Gbit/s "
    "(general figures); less for small messages.",
)
COMM_LINK_LATENCY = gauge(
    "comm_link_latency_seconds",
    "Base latency of a collective on this group, estimated from recent ones.",
    GROUP,
    usual="1e-5 to 1e-4 within a node, up to 1e-3 between nodes (general figures). Worry if "
    "it becomes a multiple of before.",
)
COMM_LINK_BANDWIDTH = gauge(
    "comm_link_bandwidth_bytes_per_second",
    "Bandwidth on this group, estimated from recent collectives of several sizes.",
    GROUP,
    lean=EVERY_SERIES,
    usual="Near comm_link_best_bandwidth_bytes_per_second; estimates vary by 10 to 20 %. "
    f"Worry below {LINK_BANDWIDTH_LOW:g} of the best.",
)
COMM_LINK_BEST_BANDWIDTH = gauge(
    "comm_link_best_bandwidth_bytes_per_second",
    "Highest bandwidth sustained over three comparisons since the start. The present estimate may "
    "be above it, as it has not lasted.",
    GROUP,
    usual="Constant after the first minutes.",
)
COMM_EXPOSED_ERROR_RATIO = gauge(
    "comm_exposed_error_ratio",
    "Difference between the exposed seconds measured here and by the profiler, over the profiled "
    "step's time.",
    usual="Below 0.02. Above 0.05, trust the profiler more.",
)
STEP_TIME_RATIO = gauge(
    "step_time_ratio",
    "Shares of the last profiled step: computation only, communication only, both, neither.",
    Label(name="part", values=("compute", "comm", "overlap", "idle")),
    usual="`compute` and `overlap` together above 0.7. A large `idle` is time on the host or "
    "data loading.",
)
COMM_STEP_WIRE_BYTES = gauge(
    "comm_step_wire_bytes",
    "Wire bytes of a step: measured, predicted from the configuration, and the reference for "
    "its ZeRO stage (`reference`).",
    Label(name="kind", values=("measured", "predicted", "reference")),
    usual="`measured` within 10 % of `predicted`. `reference` is what the ZeRO stage needs.",
)
STRAGGLER_SCORE = gauge(
    "straggler_score_ratio",
    "Time by which this rank is slower in a phase than the median rank, over the median step; "
    "without blocked communication.",
    Label(name="phase", values=COMPARED_PHASES),
    lean=EVERY_SERIES,
    usual=f"-0.05 to 0.05. Worry above {STRAGGLER_SCORE_HIGH:g} on one rank: its host or its data.",
)
COMM_VOLUME_RATIO = gauge(
    "comm_volume_ratio",
    "Wire bytes of a step over the reference for its ZeRO stage; `zerowatch estimate` shows why.",
    usual="0.9 to 1.1. Above 1.3, the configuration sends more than its ZeRO stage needs.",
)
COMM_COVERAGE_RATIO = gauge(
    "comm_coverage_ratio",
    "Collectives recorded over collectives that the process groups counted or that replayed CUDA "
    "graphs contain; 0 with DeepCompile. Below 0.99 do not trust the comm metrics.",
    lean=EVERY_SERIES,
    usual=f"1. Below {COMM_COVERAGE_LOW:g}, some collectives bypass the instrumentation.",
)
COLLECTIVE_MISMATCHES = counter(
    "collective_mismatches_total",
    "Times that the sequences of collectives differed between ranks.",
    lean=EVERY_SERIES,
    from_zero=True,
    usual="0. Any increase: the ranks run different code, and hang or compute wrongly.",
)
EXCHANGE_FAILURES = counter(
    "exchange_failures_total",
    "Comparisons between ranks that failed: no answer from the store, no report from a peer in "
    "time, or collectives that could not be matched.",
    Label(name="reason", values=("store", "peer", "unmatched")),
    lean=Lean(only={"reason": ("store", "unmatched")}),
    from_zero=True,
    usual="0, or a few at the start and the end. Worry if it grows each minute: comparisons "
    "between ranks are then missing.",
)
PEER_HEARTBEAT_AGE = gauge(
    "peer_heartbeat_age_seconds",
    "Seconds since the last report of the peer that has been silent longest; up to "
    "cross_rank.interval_seconds plus 4 s is normal, or 24 s over a FileStore.",
    usual="Up to cross_rank.interval_seconds plus 4 s, or 24 s over a FileStore. Worry above 30 s:"
    " that rank is stopped or its host is gone.",
)
HANGS = counter(
    "hangs_total",
    "Times that this rank made no progress for hang.timeout_seconds and for ten median steps.",
    from_zero=True,
    usual="0.",
)
HANG_ACTIVE = gauge(
    "hang_active",
    "1 while this rank hangs, 0 otherwise; hangs_total counts when it becomes 1.",
    lean=EVERY_SERIES,
    usual="0. At 1, read `hang-rank-*.txt` in the run folder at once.",
)
HANG_AWAITED_RANK = gauge(
    "hang_awaited_rank",
    "While this rank hangs in a collective: the rank that has not arrived there, of several the one"
    " that has been silent for longest. Absent otherwise.",
    lean=EVERY_SERIES,
    usual="Absent. If present, look at the host of that rank.",
)

METRICS = (
    COLLECTIVE_CALLS,
    COLLECTIVE_BYTES,
    COLLECTIVE_WIRE_BYTES,
    COLLECTIVE_DURATION,
    COMM_SECONDS,
    COMM_UNION_SECONDS,
    COMM_EXPOSED_SECONDS,
    COMM_OWN_EXPOSED_SECONDS,
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
    HANG_ACTIVE,
    HANG_AWAITED_RANK,
)
