"""Test cases of the alerts on replayed windows and restarts."""

from __future__ import annotations

from rules.history import (
    GONE,
    Series,
    Stretch,
    counter,
    gauge,
    of_rank,
    training,
    training_rank,
)
from rules.promtool import Case, annotations_of

LABELS = {"job": "zerowatch", "run": "night-7"}
REPLAYS = {
    "alertname": "ZerowatchOomReplays",
    "component": "memory",
    "severity": "warning",
    **LABELS,
}
RESTARTING = {
    "alertname": "ZerowatchRestarting",
    "component": "training",
    "severity": "critical",
    **LABELS,
}


STARTED = "process_start_time_seconds"  # here the number of the process


def replays(*stretches: Stretch) -> Series:
    """Two ranks; rank 0 exports the seconds lost to replays per second."""
    minutes = sum(stretch[0] for stretch in stretches)
    lost = of_rank(0, "zerowatch_replay_seconds_total", counter(*stretches))
    return training(minutes) | lost


def restarts(*stretches: Stretch) -> Series:
    minutes = sum(stretch[0] for stretch in stretches)
    return training(minutes) | of_rank(0, STARTED, gauge(*stretches))


def crash_loop(attempts: int) -> Series:
    """Attempts that train for four minutes, each 45 s after the one before, and a last long one."""
    trains = (*((4, 1), (0.75, GONE)) * attempts, (30, 1))
    ended = [each for number in range(attempts) for each in ((4, number), (0.75, GONE))]
    attempt = (*ended, (30, attempts))
    series = training_rank(0, *trains) | training_rank(1, *trains)
    return series | of_rank(0, STARTED, gauge(*attempt))


CASES = (
    Case(
        title="Fires if a run loses 10 % of its time to replayed windows",
        # Not 0.3: that would pass the threshold on a scrape to the digit, as sums are rounded.
        series=replays((10, 0), (10, 0.28), (20, 0)),
        alert=REPLAYS,
        fires_at="14m15s",
        recovers_at="30m",
    ),
    Case(
        title="Does not fire on a few replayed windows",
        near="ZerowatchOomReplays",
        series=replays((10, 0), (2, 0.2), (28, 0)),
        until="40m",
    ),
    Case(
        title="Fires at once on three restarts within half an hour",
        series=restarts((5, 0), (5, 1), (5, 2), (45, 3)),
        alert=RESTARTING,
        fires_at="15m15s",
        recovers_at="40m15s",
        annotations=annotations_of(
            "ZerowatchRestarting",
            dashboard="zerowatch-overview",
            summary="Training night-7 keeps restarting",
            description="The run restarted 3 times within half an hour. Each attempt may get no "
            "further than the one before. Read the end of the log of the rank that ended first.",
        ),
    ),
    Case(
        title="Fires on a run that its launcher starts again each five minutes",
        series=crash_loop(3),
        alert=RESTARTING,
        fires_at="14m30s",
        recovers_at="39m15s",
    ),
    Case(
        title="Does not fire on two restarts in half an hour, or many over hours",
        near="ZerowatchRestarting",
        series=restarts((20, 4), (20, 5), (20, 6), (20, 7)),
        until="80m",
    ),
)
