"""Tests of the metrics of windows; rank 0 publishes the metrics that all ranks share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zerowatch.metrics.catalog import memory, window
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.trainer.run_metrics import RunMetrics
from zerowatch.runtime.trainer.window.step_result import StepResult


def test_counters_start_at_0_so_that_the_first_increment_is_seen():
    recorder = Recorder()

    RunMetrics(recorder, rank=0)

    values = recorder.snapshot().values
    assert values[window.WINDOW_REPLAYS] == {("committed",): 0, ("gave_up",): 0}
    assert set(values[window.ENGINE_REBUILDS].values()) == {0}
    assert values[window.RESTARTS] == {(): 0}


def test_each_rank_publishes_its_micro_batch_size_and_batch_share():
    recorder = Recorder()
    metrics = RunMetrics(recorder, rank=1)

    metrics.set_micro_batch(micro_batch_samples=3, accumulation_steps=2)
    metrics.set_batch_share(own_samples=6, global_samples=8)

    snapshot = recorder.snapshot()
    assert snapshot.value(window.MICRO_BATCH_SAMPLES) == 3
    assert snapshot.value(window.BATCH_SHARE) == 0.75
    assert window.ACCUMULATION_STEPS not in snapshot.values


def test_a_window_that_was_replayed_twice_counts_twice():
    recorder = Recorder()
    metrics = RunMetrics(recorder, rank=0)

    metrics.count_survived_oom("cpu")
    metrics.add_lost_time(seconds=1.5)
    metrics.add_lost_time(seconds=0.5)
    metrics.count_committed_window(num_replays=2)
    metrics.count_committed_window(num_replays=0)

    snapshot = recorder.snapshot()
    assert snapshot.value(window.WINDOW_REPLAYS, "committed") == 2
    assert snapshot.value(window.REPLAY_SECONDS) == 2
    assert snapshot.value(memory.OOMS, "cpu", "replayed") == 1


def test_the_rank_that_ran_out_of_memory_counts_it_and_rank_0_the_replay():
    recorder = Recorder()
    metrics = RunMetrics(recorder, rank=1)

    metrics.count_survived_oom("cpu")
    metrics.count_failed_window()

    values = recorder.snapshot().values
    assert set(values) == {memory.OOMS}


def test_a_rebuild_counts_by_its_outcome():
    recorder = Recorder()
    metrics = RunMetrics(recorder, rank=0, num_restarts=3)

    metrics.count_rebuild("committed", seconds=2)
    metrics.count_rebuild("refused", seconds=0)

    snapshot = recorder.snapshot()
    assert snapshot.value(window.ENGINE_REBUILDS, "committed") == 1
    assert snapshot.value(window.ENGINE_REBUILDS, "refused") == 1
    assert snapshot.value(window.ENGINE_REBUILD_SECONDS) == 2
    assert snapshot.value(window.RESTARTS) == 3


def test_only_the_compression_in_use_has_an_error():
    recorder = Recorder()
    metrics = RunMetrics(recorder, rank=0)

    metrics.set_compression_error("bf16", 0.002)
    metrics.set_compression_error("int8", 0.01)
    assert recorder.snapshot().values[window.COMPRESSION_ERROR] == {("int8",): 0.01}

    metrics.set_compression_error(None)
    assert recorder.snapshot().values[window.COMPRESSION_ERROR] == {}

    metrics.set_compression_error("bf16")
    assert recorder.snapshot().values[window.COMPRESSION_ERROR] == {}


def published(metrics: RunMetrics, recorder: Recorder, *, replays: int) -> dict[Any, Any]:
    """Publish a window with this number of replays; return all values but the counters at 0."""
    result = StepResult(
        step=3,
        loss=0.5,
        samples=20,
        weight=20.0,
        micro_batches=(3, 3, 2),
        replays=replays,
        skipped=False,
        seconds=1.0,
    )
    metrics.publish_window(
        result, own_samples=8, accumulation_steps=4, lost_seconds=1.5, device="cuda:1"
    )
    values = recorder.snapshot().values
    return {
        (metric, labels): value
        for metric, by_labels in values.items()
        for labels, value in by_labels.items()
        if value
    }


def test_a_replayed_window_publishes_its_sizes_and_lost_time_and_each_error_once() -> None:
    recorder = Recorder()
    metrics = RunMetrics(recorder, rank=0)
    for _ in range(3):
        metrics.count_oom(MemoryError())

    expected = {
        (window.MICRO_BATCH_SAMPLES, ()): 3,
        (window.ACCUMULATION_STEPS, ()): 4,
        (window.BATCH_SHARE, ()): 0.4,
        (window.REPLAY_SECONDS, ()): 1.5,
        (window.WINDOW_REPLAYS, ("committed",)): 2,
        (memory.OOMS, ("cuda:1", "replayed")): 3,
    }
    assert published(metrics, recorder, replays=2) == expected
    assert published(metrics, recorder, replays=0) == expected


def test_the_errors_of_a_window_that_failed_are_not_counted_with_the_next_window() -> None:
    recorder = Recorder()
    metrics = RunMetrics(recorder, rank=0)
    metrics.count_oom(MemoryError())

    metrics.count_failed_window()

    assert recorder.snapshot().value(window.WINDOW_REPLAYS, "gave_up") == 1
    assert memory.OOMS not in {metric for metric, _ in published(metrics, recorder, replays=0)}


def test_the_metrics_of_a_watch_have_this_processs_rank_and_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorders = {}
    for rank in ("0", "1"):
        recorders[rank] = Recorder()
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "5")
        RunMetrics.of_watch(SimpleNamespace(recorder=recorders[rank]))

    assert recorders["0"].snapshot().value(window.RESTARTS) == 5
    assert not recorders["1"].snapshot().values
