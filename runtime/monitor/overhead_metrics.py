"""Publishes the cost of monitoring, and the number of records that were dropped."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ...metrics.catalog import overhead, training
from ...metrics.recorder import Recorder
from ..collectives.instrument import CollectiveInstrumentation
from ..instrumentation.engine_instrumentation import EngineInstrumentation
from ..instrumentation.watch_context import WatchContext
from .comparison_monitor import ComparisonMonitor
from .memory_monitor import MemoryMonitor
from .metrics_log import MetricsLog
from .otel_exporter import OtelExporter
from .run_folder import RunFolder
from .subscriptions import Subscriptions
from .watch_sinks import WatchSinks
from .watch_thread import WatchThread


class CollectiveCosts:
    """What recording the collectives has cost and lost in this run, not in earlier ones.

    The first run of the process includes what came before its watch.
    """

    def __init__(self, context: WatchContext, collectives: CollectiveInstrumentation) -> None:
        self._collectives = collectives
        self._before = (0, 0, 0) if context.watch_index == 0 else self._totals()

    def figures(self) -> tuple[float, int, int]:
        """Return the seconds, and the calls that were lost and that were left out of a graph."""
        cost_ns, dropped, in_capture = map(int.__sub__, self._totals(), self._before)
        return cost_ns / 1e9, dropped, in_capture

    def _totals(self) -> tuple[int, int, int]:
        calls = self._collectives.call_recorder
        return self._collectives.total_cost_ns, calls.dropped_calls, calls.dropped_in_capture


class OverheadMetrics:
    """Publishes the costs and dropped records of a watch's parts, on the watch thread."""

    def __init__(
        self,
        context: WatchContext,
        *,
        collectives: CollectiveInstrumentation,
        instrumentation: EngineInstrumentation,
        memory: MemoryMonitor,
        thread: WatchThread,
        comparison: ComparisonMonitor,
        otel: OtelExporter,
        folder: RunFolder,
        metrics_log: MetricsLog,
        subscriptions: Subscriptions,
        sinks: WatchSinks,
    ) -> None:
        self._context = context
        self._collectives = CollectiveCosts(context, collectives)
        self._instrumentation = instrumentation
        self._memory, self._thread, self._comparison = memory, thread, comparison
        self._otel, self._subscriptions, self._sinks = otel, subscriptions, sinks
        self._folder, self._metrics_log = folder, metrics_log
        context.recorder.start_counters((overhead.HOOK_FAILURES,), hook=("watch thread",))
        context.recorder.set_function(
            overhead.DEAD_THREADS, lambda: context.fail_open.num_dead_threads
        )

    def publish(self) -> None:
        """Publish all values as they are now."""
        cost_seconds, num_lost, num_in_capture = self._collectives.figures()
        publish_overhead(
            self._context.recorder,
            updated_at=time.time(),
            idle_seconds=self._context.phase_timer.idle_seconds(),
            seconds=self._seconds(cost_seconds),
            dropped=self._dropped(num_lost, num_in_capture),
            failures=dict(self._context.fail_open.failures),
        )

    def _seconds(self, collectives_seconds: float) -> Mapping[str, float]:
        """Return the seconds spent so far, by part."""
        seconds = {
            "hooks": (self._instrumentation.cost_ns + self._memory.cost_ns) / 1e9,
            "collectives": collectives_seconds,
            "watch_thread": self._thread.cpu_seconds,
            "cross_rank_thread": self._comparison.cpu_seconds,
        }
        return seconds | ({"otlp_thread": self._otel.cpu_seconds} if self._otel.is_on else {})

    def _dropped(self, num_calls: int, num_in_capture: int) -> Mapping[str, int]:
        """Return the records lost so far, by part."""
        thread = self._thread
        dropped = {
            "collectives": num_calls + thread.dropped_calls,
            "graph_capture": num_in_capture,
            "steps": thread.dropped_steps,
            "timing": thread.untimed_calls,
            "run_log": self._folder.dropped + self._metrics_log.dropped + self._sinks.dropped_lines,
        }
        if self._subscriptions.has_listeners:
            dropped["listeners"] = self._subscriptions.dropped
        if self._sinks.has_sinks:
            dropped["sinks"] = self._sinks.dropped
        return dropped | ({"otlp": self._otel.dropped} if self._otel.is_on else {})


def publish_overhead(
    recorder: Recorder,
    *,
    updated_at: float,
    idle_seconds: float,
    seconds: Mapping[str, float],
    dropped: Mapping[str, int],
    failures: Mapping[str, int],
) -> None:
    """Publish what monitoring costs and has lost.

    Args:
        recorder: Gets the values.
        updated_at: When the training process was last heard of, in Unix seconds.
        idle_seconds: Time since training last made progress.
        seconds: The cost by part.
        dropped: Lost records by part.
        failures: Failures by hook.
    """
    with recorder.commit():
        recorder.set(training.LAST_ACTIVITY_TIMESTAMP, time.time() - idle_seconds)
        recorder.set(overhead.WATCH_LAST_UPDATE_TIMESTAMP, updated_at)
        for part, spent in seconds.items():
            recorder.set(overhead.WATCH_SECONDS, spent, part)
        for part, num_lost in dropped.items():
            recorder.set(overhead.DROPPED_RECORDS, num_lost, part)
        for hook, num_failures in failures.items():
            recorder.set(overhead.HOOK_FAILURES, num_failures, hook)
