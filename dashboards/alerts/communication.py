"""Alerts on what communication costs, and on ranks that do not keep together."""

from __future__ import annotations

from ...metrics.catalog import communication as comm
from ...metrics.thresholds import (
    COMM_COVERAGE_LOW,
    COMM_RATIO_HIGH,
    LINK_BANDWIDTH_LOW,
    STRAGGLER_SCORE_HIGH,
)
from ..promql import by, select, where
from ..recording import communication as recorded
from ..timing import MINUTE, Timing
from .alert import NUMBER, PERCENT, RANK, RUN, Alert
from .guards import after_some_steps, while_training

DASHBOARD = "zerowatch-communication"
STEADY_SHARE = 0.75  # of the time that a rank must be slow, to be a straggler
COMM_BOTTLENECK = "ZerowatchCommBottleneck"
LINK_SLOW = "ZerowatchLinkSlow"
STRAGGLER_RANK = "ZerowatchStragglerRank"


def communication_alerts(timing: Timing) -> tuple[Alert, ...]:
    """Return the alerts with windows of this timing."""
    return (
        _comm_bottleneck(timing),
        _link_slow(timing),
        _straggler_rank(timing),
        _collective_mismatch(),
        _comm_coverage_low(timing),
    )


def _comm_bottleneck(timing: Timing) -> Alert:
    # The long window excludes short disturbances, the short one shows that it is not over yet.
    both_windows = where(
        f"{recorded.EXPOSED_RATIO.select()} > {COMM_RATIO_HIGH}",
        f"{recorded.EXPOSED_RATIO_LONG.select()} > {COMM_RATIO_HIGH}",
    )
    return Alert(
        name=COMM_BOTTLENECK,
        component="communication",
        severity="warning",
        expression=while_training(after_some_steps(both_windows, timing)),
        for_seconds=2 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Training {RUN} waits for communication",
        description=(
            f"{PERCENT} of the training time nothing is done but wait for collectives; up to "
            f"{COMM_RATIO_HIGH:.0%} is usual. Look on the dashboard which cause is the largest: "
            "imbalance, latency, redundancy or bandwidth. The runbook says what helps against each."
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
            f"Its bandwidth is {PERCENT} of the best that it kept up in this run. See which ranks "
            "measure it, and look for errors and other traffic on their hosts' network."
        ),
        dashboard=DASHBOARD,
    )


def steady(score: str, timing: Timing) -> str:
    """Write what a rank's score does not fall below for most of the short window.

    Not the mean: of two ranks that are slow by turns each has one above zero.
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
            f"For {STEADY_SHARE:.0%} of the last minutes it was slower than the median rank by "
            f"{PERCENT} of a step or more, and all others wait for it. Look at its host first: "
            "other processes, clocks that are throttled, a slow disk."
        ),
        dashboard=DASHBOARD,
    )


def _collective_mismatch() -> Alert:
    return Alert(
        name="ZerowatchCollectiveMismatch",
        component="communication",
        severity="critical",
        # Not an increase: ranks that differ stay apart until the run ends.
        expression=while_training(f"{by('max', select(comm.COLLECTIVE_MISMATCHES))} > 0"),
        for_seconds=0,
        keep_firing_seconds=5 * MINUTE,
        summary=f"The ranks of training {RUN} do not issue the same collectives",
        description=(
            f"Times that it was seen: {NUMBER}. Such a run hangs, or computes nonsense. Look for "
            "the line in the log that names the rank and the call."
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
        summary=f"Some collectives of training {RUN} are not seen",
        description=(
            f"Only {PERCENT} of the collectives are recorded, so times of communication are too "
            "low: do not decide by them. Training itself is not affected."
        ),
        dashboard="zerowatch-overhead",
    )
