"""Alerts on exposed communication, slow links, stragglers and mismatched collectives."""

from __future__ import annotations

from ...metrics.catalog import communication as comm
from ...metrics.thresholds import (
    COMM_COVERAGE_LOW,
    COMM_RISE_HIGH,
    EXPOSED_COMM_RATIO_HIGH,
    LINK_BANDWIDTH_LOW,
    STRAGGLER_SCORE_HIGH,
)
from .. import recording_rules as recorded
from ..limits import above, below, shown
from ..promql import by, ratio, select, where
from ..timing import MINUTE, Timing
from .alert import NODE, NUMBER, PERCENT, RANK, RUN, Alert, InhibitRule
from .guards import after_some_steps, after_some_time, steps_taken, while_training

DASHBOARD = "zerowatch-communication"
STEADY_SHARE = 0.75  # the share of the last five minutes in which a straggler must be slow
STEPS_TO_COMPARE = 32  # within that time: four comparisons of the least number of steps
# A rise below this share of training time is not worth a look.
LEAST_EXPOSED_RATIO = 0.05
COMM_BOTTLENECK = "ZerowatchCommBottleneck"
COMM_RATIO_ROSE = "ZerowatchCommRatioRose"
LINK_SLOW = "ZerowatchLinkSlow"
STRAGGLER_RANK = "ZerowatchStragglerRank"
# Consequences of a slow link or rank. Defined here, because the module of the alert imports this.
_SLOWER = InhibitRule(alerts=("ZerowatchMfuDropped",))


def communication_alerts(timing: Timing) -> tuple[Alert, ...]:
    """Return the alerts; `timing` sets their PromQL ranges."""
    return (
        _comm_bottleneck(timing),
        _comm_ratio_rose(timing),
        _link_slow(timing),
        _straggler_rank(timing),
        _collective_mismatch(),
        _comm_coverage_low(timing),
    )


def _comm_bottleneck(timing: Timing) -> Alert:
    # The 30 minutes exclude short disturbances. The 5 minutes end the alert soon after the cause.
    both_ranges = where(
        above(recorded.EXPOSED_RATIO.select(), EXPOSED_COMM_RATIO_HIGH),
        f"({above(recorded.EXPOSED_RATIO_LONG.select(), EXPOSED_COMM_RATIO_HIGH)})",
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
            f"{shown(EXPOSED_COMM_RATIO_HIGH)} is usual. Look up the largest cause on the "
            "dashboard: imbalance, latency, redundancy or bandwidth. The runbook lists what to do "
            "about each."
        ),
        dashboard=DASHBOARD,
        inhibits=InhibitRule(alerts=(COMM_RATIO_ROSE, *_SLOWER.alerts)),
    )


def _comm_ratio_rose(timing: Timing) -> Alert:
    exposed = recorded.EXPOSED_RATIO.select()
    rise = above(ratio(exposed, recorded.EXPOSED_RATIO_USUAL.select()), COMM_RISE_HIGH)
    rise = where(rise, f"{exposed} > {LEAST_EXPOSED_RATIO}")
    return Alert(
        name=COMM_RATIO_ROSE,
        component="communication",
        severity="warning",
        expression=while_training(
            after_some_steps(after_some_time(rise, recorded.EXPOSED_RATIO, timing.long), timing)
        ),
        for_seconds=10 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Training {RUN} waits longer for communication than it did",
        description=(
            "The share of training time that is only spent waiting for collectives is "
            '{{ $value | printf "%.1f" }} times the median of the run\'s own last six hours; up to '
            f"{shown(COMM_RISE_HIGH)} is usual. Something changed since: a link, a rank, the data "
            "or a setting. The dashboard shows which cause grew."
        ),
        dashboard=DASHBOARD,
        inhibits=_SLOWER,
    )


def _link_slow(timing: Timing) -> Alert:
    bandwidth = f"avg_over_time({recorded.LINK_BANDWIDTH_RATIO.select()}[{timing.short}])"
    slow = below(bandwidth, LINK_BANDWIDTH_LOW)
    # One low estimate among many is chance. It counts if the group has no other.
    ranks, slow_ranks = by("count", bandwidth, "group"), by("count", slow, "group")
    several = f"({slow_ranks} > 1 or {slow_ranks} == {ranks})"
    return Alert(
        name=LINK_SLOW,
        component="communication",
        severity="warning",
        expression=while_training(where(by("min", slow, "node", "group"), several, "group")),
        for_seconds=2 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=(
            f"A link of training {RUN} has become slow, seen from {NODE} in group "
            "{{ $labels.group }}"
        ),
        description=(
            f"The bandwidth that ranks on {NODE} measure is {PERCENT} of the usual one of the last "
            "six hours. If all hosts of a run report this, the slowest link may be at any of them. "
            "Check the network of these hosts for errors and other traffic."
        ),
        dashboard=DASHBOARD,
        inhibits=_SLOWER,
    )


def steady(score: str, timing: Timing, *, long: bool = False) -> str:
    """Return the score that a rank exceeds for 75 % of the last five minutes, or thirty.

    A mean would not do: if two ranks are slow alternately, both means are above zero.
    """
    time_range = timing.long if long else timing.short
    return f"quantile_over_time({1 - STEADY_SHARE}, {score}[{time_range}])"


def _straggler_rank(timing: Timing) -> Alert:
    score = recorded.STRAGGLER_SCORE.select()
    taken = steps_taken(timing.short)
    # A score stays until the next comparison, which needs eight steps. One alone is often chance.
    enough = f">= {STEPS_TO_COMPARE}"
    scored = where(above(steady(score, timing), STRAGGLER_SCORE_HIGH), f"{taken} {enough}")
    scored_long = where(
        above(steady(score, timing, long=True), STRAGGLER_SCORE_HIGH),
        f"{steps_taken(timing.long)} {enough}",
    )
    # No long evaluation, in which the last score would stay.
    scored_long = where(scored_long, f"min_over_time({taken}[{timing.long}:{timing.short}]) > 0")
    # Where phases are not compared, the rank for which all others wait waits least.
    wait = above(steady(recorded.WAIT_SHORTFALL.select(), timing), STRAGGLER_SCORE_HIGH)
    slow = (
        f"(\n{scored}\nor {scored_long}\nunless on (job, run) {taken} {enough}\n"
        f"or {where(wait, f'{taken} > 0')}\nunless on (job, run) {score}\n)"
    )
    return Alert(
        name=STRAGGLER_RANK,
        component="communication",
        severity="warning",
        expression=while_training(after_some_steps(slow, timing), "rank"),
        for_seconds=2 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Rank {RANK} of training {RUN} is slow on {NODE}",
        description=(
            f"During {STEADY_SHARE:.0%} of the last five minutes, or of thirty if steps are slow, "
            f"this rank was slower than the median rank by at least {PERCENT} of a step"
            "{{ with $labels.phase }}, in {{ . }}{{ end }}, and all other ranks wait for it. Check "
            f"{NODE} first for other processes, throttled clocks and a slow disk."
        ),
        dashboard=DASHBOARD,
        inhibits=_SLOWER,
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
        expression=while_training(below(coverage, COMM_COVERAGE_LOW)),
        for_seconds=5 * MINUTE,
        keep_firing_seconds=15 * MINUTE,
        summary=f"zerowatch misses some collectives of training {RUN}",
        description=(
            f"zerowatch records only {PERCENT} of the collectives, so the communication times "
            "shown are too low. Do not base decisions on them. Training itself is not affected."
        ),
        dashboard="zerowatch-overhead",
    )
