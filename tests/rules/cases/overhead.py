"""Alerts on zerowatch itself."""

from __future__ import annotations

from rules.history import Series, Stretch, counter, gauge, of_both, of_rank, training
from rules.promtool import Case, says

LABELS = {"job": "zerowatch", "run": "night-7"}
OVERHEAD = {
    "alertname": "ZerowatchWatchOverhead",
    "severity": "info",
    "component": "watch",
    **LABELS,
}
SAFE_MODE = {
    "alertname": "ZerowatchTunerSafeMode",
    "severity": "warning",
    "component": "tuner",
    **LABELS,
}


def cost(*stretches: Stretch) -> Series:
    """What watching costs: hooks this much, threads half as much."""
    minutes = sum(stretch[0] for stretch in stretches)
    halves = tuple((length, value / 2) for length, value in stretches if value is not None)
    seconds = "zerowatch_watch_seconds_total"
    return (
        training(minutes)
        | of_both(seconds, counter(*stretches), part="hooks")
        | of_both(seconds, counter(*halves), part="watch_thread")
    )


CASES = (
    Case(
        title="Watching that costs three hundredths of the time is told of",
        series=cost((15, 0.02), (18, 0.002)),
        alert=OVERHEAD,
        fires_at="13m30s",
        recovers_at="32m",
        annotations=says(
            "ZerowatchWatchOverhead",
            dashboard="zerowatch-overhead",
            summary="Monitoring of training night-7 costs more than it should",
            description="Monitoring takes 3% of the time of a rank. The dashboard shows which "
            "part; the runbook says which settings make each part cheaper.",
        ),
    ),
    Case(
        title="Watching that costs three two-hundredths of the time is bearable",
        series=cost((15, 0.01)),
        until="15m",
    ),
    Case(
        title="A tuner in safe mode is told of at once",
        series=training(15)
        | of_rank(0, "zerowatch_tuner_state", gauge((3, 0), (5, 1), (7, 0)), state="safe_mode"),
        alert=SAFE_MODE,
        fires_at="3m15s",
        recovers_at="13m15s",
    ),
    Case(
        title="A tuner in any other state is not told of",
        series=training(5)
        | of_rank(0, "zerowatch_tuner_state", gauge((5, 0)), state="safe_mode")
        | of_rank(0, "zerowatch_tuner_state", gauge((5, 1)), state="observe"),
        until="5m",
    ),
)
