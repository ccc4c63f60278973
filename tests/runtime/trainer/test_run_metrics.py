"""Tests of the metrics of windows; rank 0 publishes the metrics that all ranks share."""

from __future__ import annotations

from zerowatch.metrics.catalog import memory, window
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.trainer.run_metrics import RunMetrics


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
