"""Tests of the cost of monitoring and of its dropped records, as they are published."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.sleeping_collectives import ManualClock
from fakes.watch_contexts import watch_context

from zerowatch.metrics.catalog import overhead, training
from zerowatch.metrics.recorder import Snapshot
from zerowatch.runtime.common.phase_timer import PhaseTimer
from zerowatch.runtime.instrumentation.watch_context import WatchContext
from zerowatch.runtime.monitor.overhead_metrics import OverheadMetrics


def metrics_of(context: WatchContext, **changes: Any) -> OverheadMetrics:
    """The metrics of a watch whose parts have taken and lost different amounts."""
    parts: dict[str, Any] = {
        "collectives": SimpleNamespace(
            total_cost_ns=3_000_000_000, call_recorder=context.call_recorder
        ),
        "instrumentation": SimpleNamespace(cost_ns=5_000_000_000),
        "memory": SimpleNamespace(cost_ns=2_000_000_000),
        "thread": SimpleNamespace(
            cpu_seconds=11.0, dropped_calls=13, dropped_steps=17, untimed_calls=19
        ),
        "comparison": SimpleNamespace(cpu_seconds=23.0),
        "otel": SimpleNamespace(is_on=False, cpu_seconds=29.0, dropped=31),
        "folder": SimpleNamespace(dropped=37),
        "metrics_log": SimpleNamespace(dropped=41),
        "subscriptions": SimpleNamespace(has_listeners=False, dropped=43),
        "sinks": SimpleNamespace(has_sinks=False, dropped=47, dropped_lines=61),
    }
    context.call_recorder.dropped_calls = 53
    context.call_recorder.stream_waits.dropped_in_capture = 59
    return OverheadMetrics(context, **(parts | changes))


def published(context: WatchContext, **changes: Any) -> Snapshot:
    metrics_of(context, **changes).publish()
    return context.recorder.snapshot()


def by_label(snapshot: Snapshot, spec: Any) -> dict[str, float]:
    return {labels[0]: value for labels, value in snapshot.values[spec].items()}


def test_the_time_of_hooks_and_threads_is_published_by_part() -> None:
    snapshot = published(watch_context())

    assert by_label(snapshot, overhead.WATCH_SECONDS) == {
        "hooks": 7.0,
        "collectives": 3.0,
        "watch_thread": 11.0,
        "cross_rank_thread": 23.0,
    }


def test_lost_records_are_published_by_the_part_that_lost_them() -> None:
    snapshot = published(watch_context())

    assert by_label(snapshot, overhead.DROPPED_RECORDS) == {
        "collectives": 53 + 13,
        "graph_capture": 59,
        "steps": 17,
        "timing": 19,
        "run_log": 37 + 41 + 61,
    }


@pytest.mark.parametrize(
    ("changes", "part", "num_lost"),
    [
        ({"otel": SimpleNamespace(is_on=True, cpu_seconds=29.0, dropped=31)}, "otlp", 31),
        ({"subscriptions": SimpleNamespace(has_listeners=True, dropped=43)}, "listeners", 43),
        ({"sinks": SimpleNamespace(has_sinks=True, dropped=47, dropped_lines=0)}, "sinks", 47),
    ],
)
def test_a_part_that_a_run_uses_has_its_lost_records(
    changes: dict[str, Any], part: str, num_lost: int
) -> None:
    snapshot = published(watch_context(), **changes)

    lost = by_label(snapshot, overhead.DROPPED_RECORDS)
    assert lost.keys() == {"collectives", "graph_capture", "steps", "timing", "run_log", part}
    assert lost[part] == num_lost


def test_a_later_run_of_the_process_has_only_its_own_costs_and_losses() -> None:
    context = replace(watch_context(), watch_index=1)
    calls = context.call_recorder
    collectives = SimpleNamespace(total_cost_ns=3_000_000_000, call_recorder=calls)
    metrics = metrics_of(context, collectives=collectives)

    collectives.total_cost_ns += 500_000_000
    calls.dropped_calls += 2
    calls.stream_waits.dropped_in_capture += 4
    metrics.publish()

    snapshot = context.recorder.snapshot()
    lost = by_label(snapshot, overhead.DROPPED_RECORDS)
    assert by_label(snapshot, overhead.WATCH_SECONDS)["collectives"] == 0.5
    assert (lost["collectives"], lost["graph_capture"]) == (2 + 13, 4)


def test_the_thread_of_otlp_has_a_time_if_it_exports() -> None:
    otel = SimpleNamespace(is_on=True, cpu_seconds=29.0, dropped=31)

    seconds = by_label(published(watch_context(), otel=otel), overhead.WATCH_SECONDS)

    assert seconds["otlp_thread"] == 29.0


def test_failures_are_published_by_hook_and_the_watch_thread_starts_at_zero() -> None:
    context = watch_context()
    metrics = metrics_of(context)
    before = by_label(context.recorder.snapshot(), overhead.HOOK_FAILURES)
    context.fail_open.failures.update({"collectives": 2, "flops": 1})

    metrics.publish()

    assert before == {"watch thread": 0}
    assert by_label(context.recorder.snapshot(), overhead.HOOK_FAILURES) == {
        "watch thread": 0,
        "collectives": 2,
        "flops": 1,
    }


def test_threads_that_died_are_counted_at_each_scrape() -> None:
    context = watch_context()
    metrics_of(context)

    def values() -> float | None:
        return context.recorder.snapshot().value(overhead.DEAD_THREADS)

    before = values()
    thread = context.fail_open.thread("watch", lambda: None)
    thread.start()
    thread._thread.join()

    assert (before, values()) == (0, 1)


def test_the_last_activity_is_as_long_ago_as_the_last_change_of_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock()
    context = watch_context(phase_timer=PhaseTimer(clock))
    clock.elapse(7_000)
    monkeypatch.setattr(time, "time", lambda: 1_790_000_000.0)

    snapshot = published(context)

    assert snapshot.value(training.LAST_ACTIVITY_TIMESTAMP) == 1_789_999_993.0
    clock.elapse(1_000)
    context.phase_timer.mark_replay()  # of a captured graph, which is the whole step
    assert published(context).value(training.LAST_ACTIVITY_TIMESTAMP) == 1_790_000_000.0
    assert snapshot.value(overhead.WATCH_LAST_UPDATE_TIMESTAMP) == 1_790_000_000.0
