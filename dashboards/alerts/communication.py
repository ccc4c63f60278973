"""Alerts on exposed communication, slow links, stragglers and mismatched collectives."""

from __future__ import annotations

from ...metrics.catalog import communication as comm
from ...metrics.thresholds import (
    COMM_COVERAGE_LOW,
    EXPOSED_COMM_RATIO_HIGH,
    LINK_BANDWIDTH_LOW,
    STRAGGLER_SCORE_HIGH,
)
from .. import recording_rules as recorded
from ..promql import by, select, where
from ..timing import MINUTE, Timing
from .alert import NUMBER, PERCENT, RANK, RUN, Alert
from .guards import after_some_steps, while_training

DASHBOARD = "zerowatch-communication"
STEADY_SHARE = 0.75  # the share of the last five minutes in which a straggler must be slow
COMM_BOTTLENECK = "ZerowatchCommBottleneck"
LINK_SLOW = "ZerowatchLinkSlow"
STRAGGLER_RANK = "ZerowatchStragglerRank"


def communication_alerts(timing: Timing) -> tuple[Alert, ...]:
    """Return the alerts; `timing` sets their PromQL ranges."""
    return (
        _comm_bottleneck(timing),
        _link_slow(timing),
        _straggler_rank(timing),
        _collective_mismatch(),
        _comm_coverage_low(timing),
    )


def _comm_bottleneck(timing: Timing) -> Alert:
    # The 30 minutes exclude short disturbances. The 5 minutes end the alert soon after the cause.
    both_ranges = where(
        f"{recorded.EXPOSED_RATIO.select()} > {EXPOSED_COMM_RATIO_HIGH}",
        f"{recorded.EXPOSED_RATIO_LONG.select()} > {EXPOSED_COMM_RATIO_HIGH}",
    )
    return Alert(
        name=COMM_BOTTLENECK,
        component="communication",
        severity="warning",
        expression=while_training(after_some_steps(both_ranges, timing)),
        for_seconds=2 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Training {RUN} waits for communication",
        description=(
            f"Training spends {PERCENT} of its time only waiting for collectives; up to "
            f"{EXPOSED_COMM_RATIO_HIGH:.0%} is usual. Look up the largest cause on the dashboard: "
            "imbalance, latency, redundancy or bandwidth. The runbook lists what to do about each."
        ),
        dashboard=DASHBOARD,
    )


def _link_slow(timing: Timing) -> Alert:
    usual = f"avg_over_time({recorded.LINK_BANDWIDTH_RATIO.select()}[{timing.short}])"
    return Alert(
        name=LINK_SLOW,
        component="communication",
        severity="warning",
        expression=while_training(f"{by('min', usual, 'group')} < {LINK_BANDWIDTH_LOW}"),
        for_seconds=2 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"A link of training {RUN} has become slow, in group {{{{ $labels.group }}}}",
        description=(
            f"The link's bandwidth is {PERCENT} of the best that it sustained in this run. The "
            "dashboard shows which ranks measure it. Check the network of their hosts for errors "
            "and other traffic."
        ),
        dashboard=DASHBOARD,
    )


def steady(score: str, timing: Timing) -> str:
    """Return the score that a rank exceeds for 75 % of the last five minutes.

    A mean would not do: if two ranks are slow alternately, both means are above zero.
    """
    return f"quantile_over_time({1 - STEADY_SHARE}, {score}[{timing.short}])"


def _straggler_rank(timing: Timing) -> Alert:
    score = steady(recorded.STRAGGLER_SCORE.select(), timing)
    slow = after_some_steps(f"{score} > {STRAGGLER_SCORE_HIGH}", timing)
    return Alert(
        name=STRAGGLER_RANK,
        component="communication",
        severity="warning",
        expression=while_training(slow, "rank"),
        for_seconds=2 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Rank {RANK} of training {RUN} is slow in {{{{ $labels.phase }}}}",
        description=(
            f"During {STEADY_SHARE:.0%} of the last five minutes this rank was slower than the "
            f"median rank by at least {PERCENT} of a step, and all other ranks wait for it. Check "
            "its host first for other processes, throttled clocks and a slow disk."
        ),
        dashboard=DASHBOARD,
    )


def _collective_mismatch() -> Alert:
    return Alert(
        name="ZerowatchCollectiveMismatch",
        component="communication",
        severity="critical",
        # The total and not an increase, because ranks do not match again until the run ends.
        expression=while_training(f"{by('max', select(comm.COLLECTIVE_MISMATCHES))} > 0"),
        for_seconds=0,
        keep_firing_seconds=5 * MINUTE,
        summary=f"The ranks of training {RUN} do not issue the same collectives",
        description=(
            f"Mismatches so far: {NUMBER}. A run with a mismatch hangs or computes wrong results. "
            "The log names the rank and the call. Stop the run and correct the script."
        ),
        dashboard=DASHBOARD,
    )


def _comm_coverage_low(timing: Timing) -> Alert:
    coverage = f"avg_over_time({recorded.COVERAGE.select()}[{timing.short}])"
    return Alert(
        name="ZerowatchCommCoverageLow",
        component="communication",
        severity="info",
        expression=while_training(f"{coverage} < {COMM_COVERAGE_LOW}"),
        for_seconds=5 * MINUTE,
        keep_firing_seconds=15 * MINUTE,
        summary=f"zerowatch misses some collectives of training {RUN}",
        description=(
            f"zerowatch records only {PERCENT} of the collectives, so the communication times "
            "shown are too low. Do not base decisions on them. Training itself is not affected."
        ),
        dashboard="zerowatch-overhead",
    )
