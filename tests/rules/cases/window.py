"""Alerts on windows that are done again, and on runs that are started again."""

from __future__ import annotations

from rules.history import Series, Stretch, counter, gauge, of_rank, training
from rules.promtool import Case, says

LABELS = {"job": "zerowatch", "run": "night-7"}
DONE_AGAIN = {
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
    """Two ranks, of which rank 0 tells the seconds that each second loses to replays."""
    minutes = sum(stretch[0] for stretch in stretches)
    lost = of_rank(0, "zerowatch_replay_seconds_total", counter(*stretches))
    return training(minutes) | lost


def restarts(*stretches: Stretch) -> Series:
    minutes = sum(stretch[0] for stretch in stretches)
    return training(minutes) | of_rank(0, "zerowatch_restarts_total", gauge(*stretches))


CASES = (
    Case(
        title="A run that loses a tenth of its time to replayed windows fires",
        # Not 0.3: that would pass the threshold on a scrape to the digit, as sums are rounded.
        series=replays((10, 0), (10, 0.28), (20, 0)),
        alert=DONE_AGAIN,
        fires_at="14m15s",
        recovers_at="30m",
    ),
    Case(
        title="Some windows that were done again as memory was tight are no alarm",
        series=replays((10, 0), (2, 0.2), (28, 0)),
        until="40m",
    ),
    Case(
        title="A run that was started three times within half an hour is told of at once",
        series=restarts((5, 0), (5, 1), (5, 2), (45, 3)),
        alert=RESTARTING,
        fires_at="15m15s",
        recovers_at="40m",
        annotations=says(
            "ZerowatchRestarting",
            dashboard="zerowatch-memory",
            summary="Training night-7 is started again and again",
            description="3 times within half an hour. Each time it goes on from its last save, and "
            "may not come much further. Look at what the rank that ended first wrote last.",
        ),
    ),
    Case(
        title="Two restarts in half an hour, or many over hours, are no alarm",
        series=restarts((20, 4), (20, 5), (20, 6), (20, 7)),
        until="80m",
    ),
)
