"""Finds what is wrong with a run at this moment, by the thresholds of the alerts.

Prometheus evaluates the alerts over minutes, and over all ranks. Rank 0 has neither, so its result
is only what would fire if the present values lasted. Each problem names the alert, and with it the
section of the runbook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ...metrics.catalog import (
    across_ranks,
    communication,
    devices,
    memory,
    overhead,
    training,
    tuner,
)
from ...metrics.recorder import Snapshot
from ...metrics.thresholds import (
    COMM_COVERAGE_LOW,
    DATA_RATIO_HIGH,
    EXPOSED_COMM_RATIO_HIGH,
    OOM_RISK_CRITICAL,
    OOM_RISK_HIGH,
    RECORDS_LOST_HIGH,
    SEVERITIES,
    STEPS_TO_JUDGE,
    Severity,
    Threshold,
)
from ...metrics.xid_errors import DRAIN_XIDS, describe
from .step_history import PHASE_INDEX, Point

Limit = Callable[[Threshold], float]
# Age of the last update of the metrics from which they count as stale.
STALE_SECONDS = 30.0
# For so long a loss that was not finite is a problem, as in the alert.
NONFINITE_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A threshold that is exceeded now.

    Attributes:
        alert: The name of the alert about it.
        severity: The severity of the alert.
        text: The figures.
    """

    alert: str
    severity: Severity
    text: str


def current_problems(
    snapshot: Snapshot,
    *,
    recent: Point | None,
    slow: Mapping[int, Mapping[str, float]],
    thresholds: Mapping[str, float],
    now: float,
    nonfinite_at: float | None = None,
) -> list[Problem]:
    """Return the problems of now, critical ones first; none of a run that has ended.

    Args:
        snapshot: The metrics of rank 0.
        recent: The steps of the last minute.
        slow: By rank the phases in which it is slow, with its score.
        thresholds: Thresholds that the settings replace, by name.
        now: Unix time.
        nonfinite_at: Unix time of the last loss that was not finite, if known.
    """
    if not snapshot.value(training.RUN_ACTIVE) or training.RUN_END_INFO in snapshot.values:
        return []

    limit = limit_of(thresholds)
    found = [
        *problems_of_rank(snapshot, 0, limit),
        *_of_progress(snapshot, recent, now, nonfinite_at),
        *_of_communication(snapshot, recent, slow, limit),
        *_of_memory(snapshot, limit),
    ]
    return sorted(found, key=lambda problem: SEVERITIES.index(problem.severity))


def limit_of(thresholds: Mapping[str, float]) -> Limit:
    """Return a function that returns the value of a threshold, with those of the settings."""
    return lambda threshold: thresholds.get(threshold.name, float(threshold))


def problems_of_rank(snapshot: Snapshot, rank: int, limit: Limit) -> Iterator[Problem]:
    """Yield the problems that each rank's own metrics show, from those of any rank."""
    if snapshot.value(communication.HANG_ACTIVE):
        awaited = snapshot.value(communication.HANG_AWAITED_RANK)
        waits = "" if awaited is None else f" and waits for rank {awaited:.0f}"
        yield Problem(
            alert="ZerowatchRankHung",
            severity="critical",
            text=f"rank {rank} makes no progress{waits}; the first line of hang-rank-{rank}-*.txt "
            "in the run folder names the ranks that are missing",
        )
    if snapshot.value(overhead.DEAD_THREADS):
        yield Problem(
            alert="ZerowatchMonitoringDead",
            severity="warning",
            text=f"a monitoring thread of rank {rank} has ended: some of its figures no longer "
            "change; its log has the reason",
        )
    for part in ("steps", "run_log"):
        lost = snapshot.value(overhead.DROPPED_RECORDS, part) or 0.0
        if lost > limit(RECORDS_LOST_HIGH):
            yield Problem(
                alert="ZerowatchRecordsLost",
                severity="warning",
                text=f"rank {rank} has lost {lost:,.0f} records since the start ({part}); its log "
                "has the reason",
            )
    yield from _gpu_faults(snapshot, rank)


def _gpu_faults(snapshot: Snapshot, rank: int) -> Iterator[Problem]:
    """Yield the faults that a rank's GPU does not recover from while the run lasts."""
    for (device,), is_lost in snapshot.values.get(devices.DEVICE_LOST, {}).items():
        if is_lost:
            yield Problem(
                alert="ZerowatchGpuLost",
                severity="critical",
                text=f"the driver no longer reaches {device} of rank {rank}, or must reset it "
                "first",
            )
    for (device, xid), count in snapshot.values.get(devices.DEVICE_XID_ERRORS, {}).items():
        if count and xid in DRAIN_XIDS:
            yield Problem(
                alert="ZerowatchGpuXid",
                severity="critical",
                text=f"XID {xid} on {device} of rank {rank}, {count:,.0f} "
                f"time{'s' * (count != 1)} since the start: {describe(int(xid))}",
            )
    for (device, kind), count in snapshot.values.get(devices.DEVICE_ECC_ERRORS, {}).items():
        if count and kind == "uncorrected":
            yield Problem(
                alert="ZerowatchGpuUncorrectableEcc",
                severity="critical",
                text=f"{count:,.0f} uncorrected memory error{'s' * (count != 1)} on {device} of "
                f"rank {rank} since the start",
            )


def _of_progress(
    snapshot: Snapshot, recent: Point | None, now: float, nonfinite_at: float | None
) -> Iterator[Problem]:
    updated_at = snapshot.value(overhead.WATCH_LAST_UPDATE_TIMESTAMP)
    if updated_at is not None and now - updated_at > STALE_SECONDS:
        yield Problem(
            alert="ZerowatchMetricsStale",
            severity="warning",
            text=f"the metrics were last updated {now - updated_at:.0f} s ago",
        )
    if recent is not None and recent.nonfinite_losses:
        yield Problem(
            alert="ZerowatchLossNotFinite",
            severity="critical",
            text=f"{recent.nonfinite_losses} of the last {recent.steps} steps had a loss that is "
            "not finite",
        )
    elif nonfinite_at is not None and now - nonfinite_at < NONFINITE_SECONDS:
        yield Problem(
            alert="ZerowatchLossNotFinite",
            severity="critical",
            text=f"the last loss that is not finite was {now - nonfinite_at:.0f} s ago",
        )
    if snapshot.value(tuner.TUNER_STATE, "safe_mode"):
        yield Problem(
            alert="ZerowatchTunerSafeMode",
            severity="warning",
            text="the tuner could not undo a change",
        )


def _of_communication(
    snapshot: Snapshot,
    recent: Point | None,
    slow: Mapping[int, Mapping[str, float]],
    limit: Limit,
) -> Iterator[Problem]:
    if recent is not None and recent.steps >= STEPS_TO_JUDGE:
        exposed = recent.exposed_seconds / recent.timed_seconds if recent.timed_seconds else 0.0
        if exposed > limit(EXPOSED_COMM_RATIO_HIGH):
            yield Problem(
                alert="ZerowatchCommBottleneck",
                severity="warning",
                text=f"{exposed:.0%} of the last minute was exposed communication, above "
                f"{limit(EXPOSED_COMM_RATIO_HIGH):.0%}",
            )
        seconds = recent.training_seconds
        data = recent.phase_seconds[PHASE_INDEX["data"]] / seconds if seconds else 0.0
        if data > limit(DATA_RATIO_HIGH):
            yield Problem(
                alert="ZerowatchDataBound",
                severity="warning",
                text=f"{data:.0%} of the last minute was spent loading data, above "
                f"{limit(DATA_RATIO_HIGH):.0%}",
            )
    coverage = snapshot.value(communication.COMM_COVERAGE_RATIO)
    if coverage is not None and coverage < limit(COMM_COVERAGE_LOW):
        yield Problem(
            alert="ZerowatchCommCoverageLow",
            severity="info",
            text=f"only {coverage:.1%} of the collectives are recorded",
        )
    if mismatches := snapshot.value(communication.COLLECTIVE_MISMATCHES):
        yield Problem(
            alert="ZerowatchCollectiveMismatch",
            severity="critical",
            text=f"the collectives differed between ranks {mismatches:.0f} times since the start",
        )
    for rank, phases in slow.items():
        for phase, score in phases.items():
            yield Problem(
                alert="ZerowatchStragglerRank",
                severity="warning",
                text=f"rank {rank} is slow in {phase}: {score:.0%} of a step",
            )


def _of_memory(snapshot: Snapshot, limit: Limit) -> Iterator[Problem]:
    extremes = snapshot.values.get(across_ranks.RANKS_EXTREME, {})
    highest = snapshot.value(across_ranks.RANKS_OOM_RISK, "max")
    if highest is None:  # a run of one rank
        highest = max(snapshot.values.get(memory.OOM_RISK, {}).values(), default=0.0)
    rank = extremes.get(("oom_risk", "max"), 0.0)
    if highest > limit(OOM_RISK_HIGH):
        is_critical = highest > limit(OOM_RISK_CRITICAL)
        yield Problem(
            alert="ZerowatchOomRiskCritical" if is_critical else "ZerowatchOomRiskHigh",
            severity="critical" if is_critical else "warning",
            text=f"rank {rank:.0f} runs out of memory within 50 steps with a probability of "
            f"{highest:.0%}",
        )
    for device, category in snapshot.values.get(memory.MEMORY_LEAK, {}):
        grown = snapshot.value(memory.MEMORY_LEAK, device, category) or 0.0
        yield Problem(
            alert="ZerowatchMemoryLeak",
            severity="warning",
            text=f"memory on {device} grows by {grown / 2**20:.1f} MiB per step ({category})",
        )
