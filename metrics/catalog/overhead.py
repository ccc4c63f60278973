"""Metrics of monitoring itself: its cost, failures and dropped records."""

from __future__ import annotations

from .spec import EVERY_SERIES, Label, Lean, counter, gauge

WATCH_SECONDS = counter(
    "watch_seconds_total",
    "Seconds spent on monitoring: wall time of hooks on the training thread, CPU time of threads.",
    Label(
        name="part",
        values=(
            "hooks",
            "collectives",
            "watch_thread",
            "cross_rank_thread",
            "http_thread",
            "otlp_thread",
        ),
    ),
    lean=Lean(without=("part",)),
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
)
DROPPED_RECORDS = counter(
    "dropped_records_total",
    "Records lost, by the part that lost them.",
    Label(
        name="part",
        values=("collectives", "steps", "timing", "graph_capture", "run_log", "otlp", "listeners"),
    ),
    lean=Lean(only={"part": ("steps", "run_log")}),
)
DEAD_THREADS = gauge(
    "dead_threads",
    "Monitoring threads that died, counted at each scrape: their metrics no longer change.",
    lean=EVERY_SERIES,
)
EXPORTER_FAILURES = counter(
    "exporter_failures_total",
    "Exports that failed.",
    Label(name="exporter"),
    lean=EVERY_SERIES,
    from_zero=True,
)
WATCH_LAST_UPDATE_TIMESTAMP = gauge(
    "watch_last_update_timestamp_seconds",
    "Unix time of the last update of these values.",
    lean=EVERY_SERIES,
)

METRICS = (
    WATCH_SECONDS,
    HOOK_FAILURES,
    DROPPED_RECORDS,
    DEAD_THREADS,
    EXPORTER_FAILURES,
    WATCH_LAST_UPDATE_TIMESTAMP,
)
