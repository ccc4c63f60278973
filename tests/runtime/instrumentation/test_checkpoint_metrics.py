"""Tests of the counts of saved and failed checkpoints."""

from __future__ import annotations

import contextlib
import time
from threading import Event, Thread, get_ident

import pytest
from fakes.clock import FakeClock, set_clock

from zerowatch.metrics.catalog import training
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.phase_timer import PhaseTimer
from zerowatch.runtime.instrumentation import checkpoint_metrics
from zerowatch.runtime.instrumentation.checkpoint_metrics import CheckpointMetrics

LIMIT_SECONDS = 60.0  # only ends a hanging test


@pytest.fixture
def recorder() -> Recorder:
    recorder = Recorder()
    recorder.start_counters(training.METRICS)
    return recorder


@pytest.fixture
def checkpoints(recorder: Recorder) -> CheckpointMetrics:
    return CheckpointMetrics(recorder, FailOpen(), PhaseTimer())


def test_a_saved_checkpoint_is_counted_with_its_time(recorder, checkpoints) -> None:
    before = time.time()
    with checkpoints.saving():
        pass

    found = recorder.snapshot()
    assert found.value(training.CHECKPOINTS, "saved") == 1
    assert found.value(training.CHECKPOINTS, "failed") == 0
    assert found.value(training.CHECKPOINT_SECONDS) > 0
    assert before <= found.value(training.LAST_CHECKPOINT_TIMESTAMP) <= time.time()


def test_a_checkpoint_inside_another_is_the_same_checkpoint(recorder, checkpoints) -> None:
    with checkpoints.saving(), checkpoints.saving():
        pass

    assert recorder.snapshot().total(training.CHECKPOINTS) == 1


def test_a_failed_checkpoint_is_counted_and_is_not_the_last_one(recorder, checkpoints) -> None:
    with pytest.raises(OSError, match="disk"), checkpoints.saving():
        raise OSError("disk full")

    found = recorder.snapshot()
    assert found.value(training.CHECKPOINTS, "failed") == 1
    assert found.value(training.LAST_CHECKPOINT_TIMESTAMP) is None


def _save(checkpoints: CheckpointMetrics) -> None:
    with contextlib.suppress(OSError), checkpoints.saving():
        raise OSError("disk full")


def _write(checkpoints: CheckpointMetrics) -> None:
    checkpoints.written(saved=False, seconds=2.0, began_at=456.0)


@pytest.mark.parametrize("fail", [_save, _write])
def test_a_failed_checkpoint_may_not_have_been_scraped_for_a_minute(
    fail, checkpoints, monkeypatch
) -> None:
    clock = FakeClock()
    set_clock(monkeypatch, checkpoint_metrics, monotonic=clock)
    seen = [checkpoints.failed_lately()]

    fail(checkpoints)
    seen.append(checkpoints.failed_lately())
    clock.seconds += 61
    seen.append(checkpoints.failed_lately())

    assert seen == [False, True, False]


def test_a_copied_state_is_counted_when_a_thread_has_written_it(recorder, checkpoints) -> None:
    with checkpoints.copying(), checkpoints.saving():  # `saving` is the engine's own method
        pass
    copied = recorder.snapshot()
    assert copied.total(training.CHECKPOINTS) == 0
    assert copied.value(training.CHECKPOINT_SECONDS) > 0
    assert copied.value(training.LAST_CHECKPOINT_TIMESTAMP) is None

    checkpoints.written(saved=True, seconds=7.0, began_at=123.0)
    checkpoints.written(saved=False, seconds=2.0, began_at=456.0)

    found = recorder.snapshot()
    assert found.value(training.CHECKPOINTS, "saved") == 1
    assert found.value(training.CHECKPOINTS, "failed") == 1
    assert found.value(training.CHECKPOINT_BACKGROUND_SECONDS) == 9.0
    assert found.value(training.LAST_CHECKPOINT_TIMESTAMP) == 123.0
    assert found.value(training.CHECKPOINT_SECONDS) == copied.value(training.CHECKPOINT_SECONDS)


def test_a_state_that_cannot_be_copied_is_a_failed_checkpoint(recorder, checkpoints) -> None:
    with pytest.raises(MemoryError), checkpoints.copying():
        raise MemoryError

    assert recorder.snapshot().value(training.CHECKPOINTS, "failed") == 1


def test_waiting_for_a_thread_takes_time_and_counts_no_checkpoint(recorder, checkpoints) -> None:
    with pytest.raises(OSError, match="disk"), checkpoints.waiting():
        raise OSError("disk full")

    found = recorder.snapshot()
    assert found.value(training.CHECKPOINT_SECONDS) > 0
    assert found.total(training.CHECKPOINTS) == 0


def test_the_time_of_a_checkpoint_is_that_of_the_outer_call(
    recorder, checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 107.0, 200.0, 211.0])
    set_clock(monkeypatch, checkpoint_metrics, perf_counter=lambda: next(clock))

    with checkpoints.saving(), checkpoints.saving():
        pass
    with checkpoints.waiting():
        pass

    assert recorder.snapshot().value(training.CHECKPOINT_SECONDS) == 7.0 + 11.0


def test_a_checkpoint_on_another_thread_is_counted_without_the_time_of_training(
    recorder, checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 200.0, 207.0])
    set_clock(monkeypatch, checkpoint_metrics, perf_counter=lambda: next(clock))
    has_begun, may_end = Event(), Event()

    def save() -> None:
        with checkpoints.saving():
            has_begun.set()
            may_end.wait(LIMIT_SECONDS)

    thread = Thread(target=save)
    thread.start()
    assert has_begun.wait(LIMIT_SECONDS)
    with checkpoints.saving():  # within the other one
        pass
    may_end.set()
    thread.join()

    found = recorder.snapshot()
    assert found.value(training.CHECKPOINTS, "saved") == 2
    assert found.value(training.CHECKPOINT_SECONDS) == 7.0


def test_the_time_of_a_checkpoint_counts_on_the_thread_to_which_training_has_moved(
    recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 107.0])
    set_clock(monkeypatch, checkpoint_metrics, perf_counter=lambda: next(clock))
    timer = PhaseTimer()
    checkpoints = CheckpointMetrics(recorder, FailOpen(), timer)

    def train() -> None:
        timer.training_thread = get_ident()
        with checkpoints.saving():
            pass

    thread = Thread(target=train)
    thread.start()
    thread.join()

    assert recorder.snapshot().value(training.CHECKPOINT_SECONDS) == 7.0


def test_after_a_failed_checkpoint_the_next_is_counted(recorder, checkpoints) -> None:
    with pytest.raises(OSError, match="disk"), checkpoints.saving(), checkpoints.saving():
        raise OSError("disk full")
    with checkpoints.saving():
        pass

    found = recorder.snapshot()
    assert found.value(training.CHECKPOINTS, "failed") == 1
    assert found.value(training.CHECKPOINTS, "saved") == 1
