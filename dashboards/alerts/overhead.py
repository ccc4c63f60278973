"""Alerts on zerowatch itself: expensive, dead or failing monitoring, and a tuner in safe mode."""

from __future__ import annotations

from ...metrics.catalog import communication as comm
from ...metrics.catalog import overhead, tuner
from ...metrics.thresholds import MONITORING_FAILURES_HIGH, RECORDS_LOST_HIGH, WATCH_RATIO_HIGH
from ..limits import above, shown
from ..promql import IDENTITY, by, increase, select
from ..recording_rules import WATCH_RATIO_BY_RANK
from ..timing import LONG_SECONDS, MINUTE, Timing
from .alert import NODE, NUMBER, PERCENT, RANK, RUN, Alert, InhibitRule
from .guards import after_some_steps, while_training

DASHBOARD = "zerowatch-overhead"
PART = "{{ $labels.part }}"
MONITORING_FAILING = "ZerowatchMonitoringFailing"
RECORDS_LOST = "ZerowatchRecordsLost"
METRICS_STALE = "ZerowatchMetricsStale"


def overhead_alerts(timing: Timing) -> tuple[Alert, ...]:
    """Return the alerts; `timing` sets their PromQL ranges."""
    return (
        _watch_overhead(timing),
        _monitoring_dead(),
        _monitoring_failing(timing),
        _records_lost(timing),
        _metrics_stale(timing),
        _tuner_safe_mode(),
    )


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
        dashboard=DASHBOARD,
    )


def _monitoring_dead() -> Alert:
    dead = by("max", select(overhead.DEAD_THREADS), "rank", "node")
    return Alert(
        name="ZerowatchMonitoringDead",
        component="watch",
        severity="warning",
        expression=while_training(f"{dead} > 0", "rank"),
        for_seconds=0,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Rank {RANK} of training {RUN} is no longer fully monitored",
        description=f"A monitoring thread of this rank, on {NODE}, has died. Training continues, "
        "but some of the rank's metrics no longer change, and alerts that use them do not fire. "
        "The log of the rank has the traceback.",
        dashboard=DASHBOARD,
        inhibits=InhibitRule(alerts=(MONITORING_FAILING, METRICS_STALE), same=(*IDENTITY, "rank")),
    )


def _by_part(counted: str, label: str, prefix: str) -> str:
    """Return counts of a rank by the label `part`, whose value is `prefix` and another label."""
    named = f'label_replace({counted}, "part", "{prefix} $1", "{label}", "(.*)")'
    return by("sum", named, "rank", "node", "part")


def _monitoring_failing(timing: Timing) -> Alert:
    hooks = _by_part(increase(overhead.HOOK_FAILURES, timing, LONG_SECONDS), "hook", "hook")
    exported = increase(overhead.EXPORTER_FAILURES, timing, LONG_SECONDS)
    exports = _by_part(exported, "exporter", "exporter")
    # A missing report of a peer is the fault of the peer, about which other alerts exist.
    exchanges = _by_part(
        " or ".join(
            increase(comm.EXCHANGE_FAILURES, timing, LONG_SECONDS, f'reason="{reason}"')
            for reason in ("store", "unmatched")
        ),
        "reason",
        "exchange",
    )
    any_of_them = (
        f"(\n{hooks} > 0\nor\n{above(exports, MONITORING_FAILURES_HIGH)}\n"
        f"or\n{above(exchanges, MONITORING_FAILURES_HIGH)}\n)"
    )
    return Alert(
        name=MONITORING_FAILING,
        component="watch",
        severity="warning",
        expression=while_training(any_of_them, "rank"),
        for_seconds=0,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Monitoring of rank {RANK} of training {RUN} fails: {PART}",
        description=f"On {NODE}, this part failed {NUMBER} times within half an hour. A failed "
        "hook is removed, and what it measured is missing from then on. Training continues. The "
        "log of the rank has the traceback or the reason.",
        dashboard=DASHBOARD,
    )


def _records_lost(timing: Timing) -> Alert:
    # Of the other parts, lost collectives lower the coverage, lost exports count as failures, and
    # listeners belong to the script. Calls in a CUDA graph are never recorded.
    counted = " or ".join(
        increase(overhead.DROPPED_RECORDS, timing, LONG_SECONDS, f'part="{part}"')
        for part in ("steps", "run_log")
    )
    lost = by("sum", counted, "rank", "node", "part")
    return Alert(
        name=RECORDS_LOST,
        component="watch",
        severity="warning",
        expression=while_training(above(lost, RECORDS_LOST_HIGH), "rank"),
        for_seconds=0,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Monitoring of rank {RANK} of training {RUN} loses records",
        description=f"On {NODE}, {NUMBER} records were lost within half an hour, by part: {PART}. "
        f"Up to {shown(RECORDS_LOST_HIGH)} are tolerated. Figures about steps are too low, or the "
        "run log has gaps. Check the disk of the run folder and the load of the host.",
        dashboard=DASHBOARD,
    )


def _metrics_stale(timing: Timing) -> Alert:
    # Not time() less the timestamp, because the clocks of hosts differ.
    updates = f"changes({select(overhead.WATCH_LAST_UPDATE_TIMESTAMP)}[{timing.short}])"
    return Alert(
        name=METRICS_STALE,
        component="watch",
        severity="warning",
        expression=while_training(f"{by('max', updates, 'rank', 'node')} == 0", "rank"),
        for_seconds=2 * MINUTE,  # until its second scrape, a rank has not changed anything yet
        keep_firing_seconds=0,  # an update proves that the thread works again
        summary=f"The metrics of rank {RANK} of training {RUN} no longer change",
        description=f"The rank on {NODE} answers scrapes, but its monitoring thread has not "
        "updated the metrics for five minutes, so other alerts about this rank cannot fire. The "
        "thread waits for a lock or the disk, or the process gets no CPU time.",
        dashboard=DASHBOARD,
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
