"""Alerts on zerowatch itself: expensive or dead monitoring, and a tuner in safe mode."""

from __future__ import annotations

from ...metrics.catalog import overhead, tuner
from ...metrics.thresholds import WATCH_RATIO_HIGH
from ..limits import above, shown
from ..promql import by, select
from ..recording_rules import WATCH_RATIO_BY_RANK
from ..timing import MINUTE, Timing
from .alert import PERCENT, RANK, RUN, Alert
from .guards import after_some_steps, while_training


def overhead_alerts(timing: Timing) -> tuple[Alert, ...]:
    """Return the alerts; `timing` sets their PromQL ranges."""
    return (_watch_overhead(timing), _monitoring_dead(), _tuner_safe_mode())


def _watch_overhead(timing: Timing) -> Alert:
    cost = above(by("avg", WATCH_RATIO_BY_RANK.select()), WATCH_RATIO_HIGH)
    return Alert(
        name="ZerowatchWatchOverhead",
        component="watch",
        severity="info",
        expression=while_training(after_some_steps(cost, timing)),
        for_seconds=10 * MINUTE,
        keep_firing_seconds=15 * MINUTE,
        summary=f"Monitoring of training {RUN} costs more than it should",
        description=(
            f"Monitoring takes {PERCENT} of a rank's time; less than {shown(WATCH_RATIO_HIGH)} is "
            "usual. The dashboard shows which part of it is expensive, and the runbook lists the "
            "settings that make each part cheaper."
        ),
        dashboard="zerowatch-overhead",
    )


def _monitoring_dead() -> Alert:
    return Alert(
        name="ZerowatchMonitoringDead",
        component="watch",
        severity="warning",
        expression=while_training(
            f"{by('max', select(overhead.DEAD_THREADS), 'rank')} > 0", "rank"
        ),
        for_seconds=0,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Rank {RANK} of training {RUN} is no longer fully monitored",
        description="A monitoring thread of this rank has died. Training continues, but some of "
        "the rank's metrics no longer change, and alerts that use them do not fire. The log of the "
        "rank has the traceback.",
        dashboard="zerowatch-overhead",
    )


def _tuner_safe_mode() -> Alert:
    state = by("max", select(tuner.TUNER_STATE, 'state="safe_mode"'))
    return Alert(
        name="ZerowatchTunerSafeMode",
        component="tuner",
        severity="warning",
        expression=while_training(f"{state} == 1"),
        for_seconds=0,
        keep_firing_seconds=5 * MINUTE,
        summary=f"The tuner of training {RUN} is in safe mode",
        description="The tuner has restored the last configuration that worked and starts no new "
        "trials. It changes settings only if memory is about to run out. Training continues. The "
        "dashboard shows the last decisions.",
        dashboard="zerowatch-tuner",
    )
