"""Alerts on replayed accumulation windows, and on runs that keep restarting."""

from __future__ import annotations

from ...metrics.catalog import window
from ...metrics.thresholds import REPLAY_RATIO_HIGH, RESTARTS_HIGH
from .. import recording_rules as recorded
from ..promql import by, select, where
from ..timing import MINUTE, Timing
from .alert import NUMBER, PERCENT, RUN, Alert
from .guards import after_some_steps, while_training


def window_alerts(timing: Timing) -> tuple[Alert, ...]:
    """Return the alerts; `timing` sets their PromQL ranges."""
    return (_oom_replays(timing), _restarting(timing))


def _oom_replays(timing: Timing) -> Alert:
    # The long range excludes single bad batches, the short one shows that it is not over yet.
    both_ranges = where(
        f"{recorded.REPLAY_RATIO_LONG.select()} > {REPLAY_RATIO_HIGH}",
        f"{recorded.REPLAY_RATIO.select()} > 0",
    )
    return Alert(
        name="ZerowatchOomReplays",
        component="memory",
        severity="warning",
        expression=while_training(after_some_steps(both_ranges, timing)),
        for_seconds=2 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Training {RUN} keeps running out of memory and replaying windows",
        description=(
            f"Replayed accumulation windows took {PERCENT} of the training time of the last half "
            "hour. No sample is lost. Start with smaller micro-batches, or free memory."
        ),
        dashboard="zerowatch-memory",
    )


def _restarting(timing: Timing) -> Alert:
    # changes() of one series does not serve: a restarted rank may answer at another port.
    restarts = f"{select(window.RESTARTS)}[{timing.long}]"
    highest = by("max", f"max_over_time({restarts})")
    lowest = by("min", f"min_over_time({restarts})")
    return Alert(
        name="ZerowatchRestarting",
        component="training",
        severity="critical",
        expression=while_training(f"{highest} - {lowest} >= {RESTARTS_HIGH}"),
        for_seconds=0,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Training {RUN} keeps restarting",
        description=(
            f"The run restarted {NUMBER} times within half an hour. Each time it resumes from its "
            "last save, and it may not get much further. Read the end of the log of the rank that "
            "ended first."
        ),
        dashboard="zerowatch-memory",
    )
