"""Test cases of the alerts on replayed windows and restarts."""

from __future__ import annotations

from rules.history import Series, Stretch, counter, gauge, of_rank, training
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


def replays(*stretches: Stretch) -> Series:
    """Two ranks; rank 0 exports the seconds lost to replays per second."""
    minutes = sum(stretch[0] for stretch in stretches)
    lost = of_rank(0, "zerowatch_replay_seconds_total", counter(*stretches))
    return training(minutes) | lost


def restarts(*stretches: Stretch) -> Series:
    minutes = sum(stretch[0] for stretch in stretches)
    return training(minutes) | of_rank(0, "zerowatch_restarts_total", gauge(*stretches))


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
        recovers_at="40m",
        annotations=annotations_of(
            "ZerowatchRestarting",
            dashboard="zerowatch-memory",
            summary="Training night-7 keeps restarting",
            description="The run restarted 3 times within half an hour. Each time it resumes from "
            "its last checkpoint, and it may not get much further. Read the end of the log of the "
            "rank that ended first.",
        ),
    ),
    Case(
        title="Does not fire on two restarts in half an hour, or many over hours",
        near="ZerowatchRestarting",
        series=restarts((20, 4), (20, 5), (20, 6), (20, 7)),
        until="80m",
    ),
)
