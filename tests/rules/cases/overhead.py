"""Test cases of the alerts on zerowatch itself."""

from __future__ import annotations

from rules.history import Series, Stretch, counter, gauge, of_both, of_rank, training
from rules.promtool import Case, annotations_of

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
    """The cost of monitoring: hooks this much, threads half as much."""
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
        title="Fires if monitoring takes 3 % of the time",
        series=cost((15, 0.02), (18, 0.002)),
        alert=OVERHEAD,
        fires_at="13m30s",
        recovers_at="32m",
        annotations=annotations_of(
            "ZerowatchWatchOverhead",
            dashboard="zerowatch-overhead",
            summary="Monitoring of training night-7 costs more than it should",
            description="Monitoring takes 3% of a rank's time; less than 2% is usual. The "
            "dashboard shows which part of it is expensive, and the runbook lists the settings "
            "that make each part cheaper.",
        ),
    ),
    Case(
        title="Does not fire if monitoring takes 1.5 % of the time",
        series=cost((15, 0.01)),
        until="15m",
    ),
    Case(
        title="Fires at once if the tuner enters safe mode",
        series=training(15)
        | of_rank(0, "zerowatch_tuner_state", gauge((3, 0), (5, 1), (7, 0)), state="safe_mode"),
        alert=SAFE_MODE,
        fires_at="3m15s",
        recovers_at="13m15s",
    ),
    Case(
        title="Does not fire in any other state of the tuner",
        series=training(5)
        | of_rank(0, "zerowatch_tuner_state", gauge((5, 0)), state="safe_mode")
        | of_rank(0, "zerowatch_tuner_state", gauge((5, 1)), state="observe"),
        until="5m",
    ),
)
