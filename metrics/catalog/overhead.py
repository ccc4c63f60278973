"""Metrics of monitoring itself: its cost, failures and dropped records."""

from __future__ import annotations

from ..thresholds import WATCH_RATIO_HIGH
from .spec import EVERY_SERIES, Label, Lean, counter, gauge

WATCH_SECONDS = counter(
    "watch_seconds_total",
    "Seconds spent on monitoring: wall time of hooks on the training thread, and CPU time of "
    "threads and of the monitoring process.",
    Label(
        name="part",
        values=(
            "hooks",
            "collectives",
            "watch_thread",
            "cross_rank_thread",
            "http_thread",
            "otlp_thread",
            "monitoring_process",
        ),
    ),
    lean=Lean(without=("part",)),
    usual=f"A rate of 0.001 to 0.01 per rank, summed over parts. Worry above {WATCH_RATIO_HIGH:g}.",
)
HOOK_FAILURES = counter(
    "hook_failures_total",
    "Exceptions of hooks. The hook is removed, or called again later after a lack of descriptors, "
    "threads or disk space. Under names such as `watch thread`: exceptions after "
    "which a thread started over, with the loss of a second of records at most. The series of the "
    "watch thread starts at 0, so that a sum over hooks exists before the first failure.",
    Label(name="hook"),
    lean=EVERY_SERIES,
    from_zero=True,
    usual="0. Each one is a defect of zerowatch or a shortage on the host; training is not "
    "affected.",
)
DROPPED_RECORDS = counter(
    "dropped_records_total",
    "Records lost, by the part that lost them.",
    Label(
        name="part",
        values=(
            *("collectives", "steps", "timing", "graph_capture", "run_log", "otlp"),
            *("listeners", "sinks"),
        ),
    ),
    lean=Lean(only={"part": ("steps", "run_log")}),
    usual="0. `timing` counts each call of DDP, because none has a duration. On devices, `timing` "
    "and `graph_capture` may grow slowly.",
)
DEAD_THREADS = gauge(
    "dead_threads",
    "Monitoring threads that died, counted at each scrape: their metrics no longer change.",
    lean=EVERY_SERIES,
    usual="0. Else the metrics of this rank no longer change: restart the run at the next "
    "checkpoint.",
)
EXPORTER_FAILURES = counter(
    "exporter_failures_total",
    "Exports that failed.",
    Label(name="exporter"),
    lean=EVERY_SERIES,
    from_zero=True,
    usual="0. `otlp`: the collector does not answer. `prometheus`: a client closed early, or "
    "a defect.",
)
WATCH_LAST_UPDATE_TIMESTAMP = gauge(
    "watch_last_update_timestamp_seconds",
    "Unix time of the last update of these values.",
    lean=EVERY_SERIES,
    usual="At most 2 s ago. Worry after 30 s: all other values are then stale.",
)

METRICS = (
    WATCH_SECONDS,
    HOOK_FAILURES,
    DROPPED_RECORDS,
    DEAD_THREADS,
    EXPORTER_FAILURES,
    WATCH_LAST_UPDATE_TIMESTAMP,
)
