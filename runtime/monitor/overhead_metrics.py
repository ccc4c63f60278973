"""What watching costs and what it lost, as metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ...metrics.catalog import overhead, training
from ...metrics.recorder import Recorder
from ..collectives.instrument import CollectiveInstrumentation
from ..common.fail_open import FailOpen
from ..common.phase_timer import PhaseTimer
from ..instrumentation.watch_context import WatchContext
from .cross_rank_monitor import CrossRankMonitor
from .otel import OtelExporter
from .run_folder import RunFolder
from .watch_thread import WatchThread


class OverheadMetrics:
    """Publishes them each second, on the watch thread.

    Args:
        recorder: Gets the values.
        clock: Tells when training last moved.
        fail_open: Counts what failed.
        seconds: By part, the seconds spent so far.
        dropped: By part, the records lost so far.
    """

    def __init__(
        self,
        recorder: Recorder,
        clock: PhaseTimer,
        fail_open: FailOpen,
        *,
        seconds: Mapping[str, Callable[[], float]],
        dropped: Mapping[str, Callable[[], int]],
    ) -> None:
        self._recorder = recorder
        self._clock = clock
        self._fail_open = fail_open
        self._seconds = seconds
        self._dropped = dropped

    def publish(self) -> None:
        """Publish all of it as it stands."""
        put = self._recorder
        with put.commit():
            put.set(training.LAST_ACTIVITY_TIMESTAMP, time.time() - self._clock.idle_seconds())
            put.set(overhead.WATCH_LAST_UPDATE_TIMESTAMP, time.time())
            for part, spent in self._seconds.items():
                put.set(overhead.WATCH_SECONDS, spent(), part)
            for part, lost in self._dropped.items():
                put.set(overhead.DROPPED_RECORDS, lost(), part)
            for hook, failures in list(self._fail_open.failures.items()):
                put.set(overhead.HOOK_FAILURES, failures, hook)


def own_costs(
    context: WatchContext,
    collectives: CollectiveInstrumentation,
    *,
    hooks_ns: Callable[[], int],
    thread: WatchThread,
    comparison: CrossRankMonitor,
    telemetry: OtelExporter,
    folder: RunFolder,
) -> OverheadMetrics:
    """Gather the costs and losses of a watch's parts.

    Args:
        context: The watch.
        collectives: The instrumentation of the collectives.
        hooks_ns: Returns the nanoseconds spent in hooks on the engine.
        thread: The watch thread.
        comparison: Has the cross-rank thread.
        telemetry: Has the thread that sends by OTLP.
        folder: Writes the run log.
    """
    seconds: dict[str, Callable[[], float]] = {
        "hooks": lambda: hooks_ns() / 1e9,
        "collectives": lambda: collectives.total_cost_ns / 1e9,
        "watch_thread": lambda: thread.cpu_seconds,
        "cross_rank_thread": lambda: comparison.cpu_seconds,
    }
    dropped: dict[str, Callable[[], int]] = {
        "collectives": lambda: context.call_recorder.dropped_calls + thread.dropped_calls,
        "graph_capture": lambda: context.call_recorder.dropped_in_capture,
        "steps": lambda: thread.dropped_steps,
        "timing": lambda: thread.untimed_calls,
        "run_log": lambda: folder.dropped,
    }
    if telemetry.is_on:
        seconds["otlp_thread"] = lambda: telemetry.cpu_seconds
        dropped["otlp"] = lambda: telemetry.dropped
    return OverheadMetrics(
        context.recorder, context.clock, context.fail_open, seconds=seconds, dropped=dropped
    )
