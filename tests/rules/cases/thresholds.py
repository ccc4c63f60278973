"""Test cases of thresholds: a run with its own value, beside a run with the default."""

from __future__ import annotations

from rules.cases.overhead import OVERHEAD, cost
from rules.history import Series, gauge, of_rank
from rules.promtool import Case, annotations_of

NAME = "watch_ratio_high"


def own_threshold(value: float, minutes: float) -> Series:
    """Return the series of a run whose settings replace the threshold."""
    return of_rank(0, "zerowatch_alert_threshold", gauge((minutes, value)), name=NAME)


def of_another_run(series: Series) -> Series:
    """Return the same series of the run day-1."""
    return {name.replace("night-7", "day-1"): values for name, values in series.items()}


CASES = (
    Case(
        title="Does not fire below the own threshold of a run",
        series=cost((15, 0.02)) | own_threshold(0.04, 15),
        until="15m",
    ),
    Case(
        title="Fires above the own threshold of a run, and not for a run with the default",
        series=cost((15, 0.01), (18, 0.002))
        | own_threshold(0.01, 33)
        | of_another_run(cost((33, 0.01))),
        alert=OVERHEAD,
        fires_at="13m30s",
        recovers_at="32m15s",
        annotations=annotations_of(
            "ZerowatchWatchOverhead",
            dashboard="zerowatch-overhead",
            summary="Monitoring of training night-7 costs more than it should",
            description="Monitoring takes 1.5% of a rank's time; less than 1% is usual. The "
            "dashboard shows which part of it is expensive, and the runbook lists the settings "
            "that make each part cheaper.",
        ),
    ),
    Case(
        title="Fires for a run with the default beside a run with its own higher threshold",
        series=cost((15, 0.02), (18, 0.002))
        | of_another_run(cost((33, 0.02)) | own_threshold(0.04, 33)),
        alert=OVERHEAD,
        fires_at="13m30s",
        recovers_at="32m",
    ),
)
