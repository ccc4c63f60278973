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
OF_RANK = {"severity": "warning", "component": "watch", "rank": "1", "node": "node-1", **LABELS}
DEAD = {"alertname": "ZerowatchMonitoringDead", **OF_RANK}
FAILING = {"alertname": "ZerowatchMonitoringFailing", **OF_RANK}
LOST = {"alertname": "ZerowatchRecordsLost", **OF_RANK}
STALE = {"alertname": "ZerowatchMetricsStale", **OF_RANK}
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
        near="ZerowatchWatchOverhead",
        series=cost((15, 0.01)),
        until="15m",
    ),
    Case(
        title="Fires at once if a monitoring thread of a rank is dead",
        series=training(15)
        | of_rank(0, "zerowatch_dead_threads", gauge((15, 0)))
        | of_rank(1, "zerowatch_dead_threads", gauge((3, 0), (5, 1), (7, 0))),
        alert=DEAD,
        fires_at="3m15s",
        recovers_at="13m15s",
        annotations=annotations_of(
            "ZerowatchMonitoringDead",
            dashboard="zerowatch-overhead",
            summary="Rank 1 of training night-7 is no longer fully monitored",
            description="A monitoring thread of this rank, on node-1, has died. Training "
            "continues, but some of the rank's metrics no longer change, and alerts that use them "
            "do not fire. The log of the rank has the traceback.",
        ),
    ),
    Case(
        title="Does not fire while all monitoring threads run",
        near="ZerowatchMonitoringDead",
        series=training(5) | of_both("zerowatch_dead_threads", gauge((5, 0))),
        until="5m",
    ),
    Case(
        title="Fires on the first failure of a hook, for half an hour",
        series=training(45)
        | of_rank(1, "zerowatch_hook_failures_total", gauge((3, None), (42, 1)), hook="flops"),
        alert={**FAILING, "part": "hook flops"},
        fires_at="3m15s",
        recovers_at="38m15s",
        annotations=annotations_of(
            "ZerowatchMonitoringFailing",
            dashboard="zerowatch-overhead",
            summary="Monitoring of rank 1 of training night-7 fails: hook flops",
            description="On node-1, this part failed 1 times within half an hour. A failed hook is "
            "removed, and what it measured is missing from then on. Training continues. The log of "
            "the rank has the traceback or the reason.",
        ),
    ),
    Case(
        title="Does not fire on five failed exports and five failed exchanges",
        near="ZerowatchMonitoringFailing",
        series=training(20)
        | of_rank(1, "zerowatch_exporter_failures_total", gauge((3, 0), (17, 5)), exporter="otlp")
        | of_rank(1, "zerowatch_exchange_failures_total", gauge((3, 0), (17, 5)), reason="store"),
        until="20m",
    ),
    Case(
        title="Fires if the store fails twenty times",
        series=training(45)
        | of_rank(1, "zerowatch_exchange_failures_total", gauge((3, 0), (42, 20)), reason="store"),
        alert={**FAILING, "part": "exchange store"},
        fires_at="3m15s",
        recovers_at="38m",
    ),
    Case(
        title="Does not fire on missing reports of a peer, which is at fault",
        near="ZerowatchMonitoringFailing",
        series=training(20)
        | of_rank(1, "zerowatch_exchange_failures_total", gauge((3, 0), (17, 99)), reason="peer"),
        until="20m",
    ),
    Case(
        title="Fires if the run log loses 200 records",
        series=training(45)
        | of_rank(1, "zerowatch_dropped_records_total", gauge((3, 0), (42, 200)), part="run_log")
        | of_rank(1, "zerowatch_dropped_records_total", gauge((45, 0)), part="steps"),
        alert={**LOST, "part": "run_log"},
        fires_at="3m15s",
        recovers_at="38m",
    ),
    Case(
        title="Does not fire on calls in a CUDA graph, which are never recorded",
        near="ZerowatchRecordsLost",
        series=training(20)
        | of_rank(1, "zerowatch_dropped_records_total", counter((20, 50)), part="graph_capture"),
        until="20m",
    ),
    Case(
        title="Fires if the metrics of a rank have not changed for five minutes",
        series=training(20)
        | of_rank(0, "zerowatch_watch_last_update_timestamp_seconds", counter((20, 1)))
        | of_rank(
            1, "zerowatch_watch_last_update_timestamp_seconds", counter((3, 1), (10, 0), (7, 1))
        ),
        alert=STALE,
        fires_at="10m",
        recovers_at="13m15s",
    ),
    Case(
        title="Does not fire on metrics of a host whose clock is an hour behind",
        near="ZerowatchMetricsStale",
        series=training(12)
        | of_rank(0, "zerowatch_watch_last_update_timestamp_seconds", counter((12, 1))),
        until="12m",
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
        near="ZerowatchTunerSafeMode",
        series=training(5)
        | of_rank(0, "zerowatch_tuner_state", gauge((5, 0)), state="safe_mode")
        | of_rank(0, "zerowatch_tuner_state", gauge((5, 1)), state="observe"),
        until="5m",
    ),
)
