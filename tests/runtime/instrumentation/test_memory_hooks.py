"""Tests of `MemoryHooks`: shapes of micro-batches, intervals of readings, detailed samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fakes.clock import FakeClock, set_clock

from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.phase_timer import (
    BACKWARD,
    EVAL,
    FORWARD,
    GENERATE,
    PhaseTimer,
)
from zerowatch.runtime.instrumentation import memory_hooks
from zerowatch.runtime.instrumentation.batch_shape import BatchShape
from zerowatch.runtime.instrumentation.memory_hooks import MemoryHooks
from zerowatch.runtime.memory.forecast.peak_readings import Shape
from zerowatch.runtime.memory.memory_reader import MemoryReader


class Engine(SimpleNamespace):
    """Stands in for an engine; it can be referenced weakly."""


class Job:
    """Memory hooks over a probe whose peak the test sets, by a clock that the test sets."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, detail_seconds: float | None = None
    ) -> None:
        self.clock = FakeClock()
        # A detailed sample then costs no time, so that a busy machine does not delay the next one.
        set_clock(monkeypatch, memory_hooks, monotonic=self.clock, perf_counter=self.clock)
        self.held = {"cpu": {"gradients": 10}}
        monkeypatch.setattr(memory_hooks, "bytes_by_category", lambda engine: dict(self.held))
        self.engine = Engine()
        self.peak_bytes, self.has_own_peaks = 500.0, True
        self.assessed: list[Shape] = []
        self.forecasts: Any = SimpleNamespace(
            assess_batch=self.assessed.append, known_risks={}, are_very_far=False
        )
        self.phases = PhaseTimer()
        self.hooks = MemoryHooks(
            self.engine,
            MemoryReader({"cpu": self._read}, {}, lambda device: self.has_own_peaks),
            self.phases,
            FailOpen(),
            forecasts=self.forecasts,
            on_exception=lambda error: None,
            detail_seconds=detail_seconds,
        )

    def step(self, *shapes: tuple[int, int], seconds: float = 1.0) -> Any:
        for number, (samples, length) in enumerate(shapes, 1):
            tokens = samples * length
            shape = BatchShape(samples=samples, tokens=tokens, sequence_length=length)
            self.hooks.on_batch_start(shape, number)
        self.pass_through()
        self.hooks.on_update_start()
        self.clock.seconds += seconds
        return self.hooks.on_step_end()

    def pass_through(self) -> None:
        for phase, peak in ((FORWARD, 700.0), (BACKWARD, 900.0)):
            self.phases.enter(phase)
            self.peak_bytes = peak
            self.phases.leave()
        self.peak_bytes = 600.0

    def _read(self) -> dict[str, float]:
        return {"allocated": 400.0, "peak_allocated": self.peak_bytes}


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def test_memory_is_read_each_quarter_of_a_second_and_far_from_limits_each_second(job: Job) -> None:
    def times_of_readings() -> list[float]:
        begin = job.clock.seconds
        readings = [job.step((2, 8), seconds=0.125) for _ in range(16)]
        assert job.clock.seconds == begin + 2.0
        return [0.125 * (i + 1) for i, reading in enumerate(readings) if reading is not None]

    near = times_of_readings()
    job.forecasts.are_very_far = True
    far = times_of_readings()
    job.forecasts.are_very_far = False
    near_again = times_of_readings()

    assert near == [0.125 + 0.25 * i for i in range(8)]
    assert far == [0.125, 1.125]
    assert near_again[:2] == [0.125, 0.375]


def test_a_step_reads_its_distinct_micro_batches(job: Job) -> None:
    reading = job.step((2, 8), (2, 16), (2, 8))

    assert reading.shapes == (Shape(2, 8), Shape(2, 16))
    assert job.assessed == [Shape(2, 8), Shape(2, 16), Shape(2, 8)]


def test_a_shape_that_is_the_same_object_again_counts_as_any_other(job: Job) -> None:
    shape, other = BatchShape(samples=2, sequence_length=8), BatchShape(4, sequence_length=8)
    readings = []
    for batches in ([shape, shape], [shape, BatchShape(), shape], [other, shape, other]):
        for number, batch in enumerate(batches, 1):
            job.hooks.on_batch_start(batch, number)
        job.clock.seconds += 1.0
        readings.append(job.hooks.on_step_end())

    assert [each.shapes for each in readings] == [
        (Shape(2, 8),),
        (Shape(2, 8),),
        (Shape(4, 8), Shape(2, 8)),
    ]
    assert len(job.assessed) == 7
    assert job.hooks.micro_batch == 3


def test_a_known_shape_is_assessed_again_after_a_reading_and_by_new_forecasts(job: Job) -> None:
    shape, size = BatchShape(samples=2, sequence_length=8), Shape(2, 8)
    is_kept = True

    def assess(batch: Shape) -> None:
        job.assessed.append(batch)
        if is_kept:
            job.forecasts.known_risks[batch] = {"cpu": 0.0}

    job.forecasts.assess_batch = assess

    def num_assessed_of_three() -> int:
        job.assessed.clear()
        for number in (1, 2, 3):
            job.hooks.on_batch_start(shape, number)
        return len(job.assessed)

    first = num_assessed_of_three()
    job.clock.seconds += 1.0
    readings = [job.hooks.on_step_end()]
    second = num_assessed_of_three()
    job.forecasts.known_risks = {}
    by_new_forecasts = num_assessed_of_three()
    job.forecasts.known_risks, is_kept = {}, False
    no_longer_kept = num_assessed_of_three()
    job.clock.seconds += 1.0
    readings.append(job.hooks.on_step_end())

    assert (first, second, by_new_forecasts, no_longer_kept) == (1, 1, 1, 3)
    assert [each.shapes for each in readings] == [(size,), (size,)]
    assert job.hooks.micro_batch == 3


def test_short_steps_share_a_reading(job: Job) -> None:
    job.step((2, 8))

    readings = [job.step((2, length), seconds=0.1) for length in (16, 32, 64)]

    assert readings[:2] == [None, None]
    assert readings[2].shapes == (Shape(2, 16), Shape(2, 32), Shape(2, 64))


def test_a_sample_after_a_change_of_memory_use_covers_only_the_steps_after_it(job: Job) -> None:
    job.step((2, 8))
    job.phases.enter(EVAL)
    job.phases.leave()
    missed = job.step((4, 8), seconds=0.1)
    job.peak_bytes = 5000.0

    job.hooks.on_use_changed()
    job.peak_bytes = 600.0
    job.hooks.on_use_changed()
    sample = job.step((2, 8), seconds=0.2)

    assert missed is None
    assert sample.readings["cpu"]["peak_allocated"] == 600.0
    assert sample.shapes == (Shape(2, 8),)
    assert sample.trained_only
    assert sample.earlier_peaks == {"cpu": {"peak_allocated": 5000.0}}
    assert job.step((2, 8)).earlier_peaks == {}


def test_data_without_tokens_has_its_elements_for_a_length(job: Job) -> None:
    job.hooks.on_batch_start(BatchShape(samples=4, elements=4 * 3 * 32 * 32), 1)

    assert job.assessed == [Shape(4, 3072)]


def test_a_batch_without_a_size_is_not_assessed(job: Job) -> None:
    job.hooks.on_batch_start(BatchShape(), 1)

    assert job.assessed == []


def test_a_detailed_sample_has_the_peak_of_each_phase_and_the_engine_s_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, detail_seconds=10.0)
    job.step()

    detail = job.step().detail

    assert detail.phase_peaks["cpu"]["forward"] == 700.0
    assert detail.phase_peaks["cpu"]["backward"] == 900.0
    assert detail.held_before == detail.held_after == {"cpu": {"gradients": 10}}


def test_detailed_samples_are_taken_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, detail_seconds=10.0)

    has_detail = [job.step().detail is not None for _ in range(25)]

    assert [number for number, seen in enumerate(has_detail) if seen] == [1, 11, 21]


def test_a_step_with_many_micro_batches_is_read_a_few_times_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, detail_seconds=10.0)
    job.step()
    reads = []
    read = job._read
    job.hooks._reader._probes = {"cpu": lambda: reads.append(1) or read()}

    for _ in range(100):
        job.pass_through()
    job.step()

    allowed = 2 * memory_hooks.READINGS_PER_DETAIL + memory_hooks.READINGS_OF_UPDATE
    assert len(reads) <= allowed + 2


def test_an_evaluation_within_a_detailed_sample_does_not_change_the_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, detail_seconds=10.0)
    job.step()
    for _ in range(100):
        job.phases.enter(EVAL)
        job.peak_bytes = 5000.0
        job.phases.leave()
        job.peak_bytes = 600.0

    reading = job.step()

    assert reading.detail.phase_peaks["cpu"]["eval"] == 5000.0
    assert reading.detail.phase_peaks["cpu"]["backward"] == 900.0
    assert not reading.trained_only
    assert job.step().trained_only


def test_a_generation_changes_neither_the_peak_of_the_step_nor_what_it_was_trained_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, detail_seconds=10.0)
    job.step()
    job.hooks.on_generation_start()
    job.phases.enter(GENERATE)
    job.peak_bytes = 5000.0
    job.phases.leave()
    job.hooks.on_generation_end()

    reading = job.step()

    assert reading.generation_peaks == {"cpu": {"peak_allocated": 5000.0}}
    assert reading.detail.phase_peaks["cpu"]["generate"] == 5000.0
    assert reading.detail.phase_peaks["cpu"]["backward"] == 900.0
    assert reading.trained_only
    assert job.step().generation_peaks == {}


def test_without_peaks_of_its_own_a_generation_has_no_peak_and_a_phase_what_is_in_use_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, detail_seconds=10.0)
    job.has_own_peaks = False
    job.step()
    job.hooks.on_generation_start()
    job.phases.enter(GENERATE)
    job.peak_bytes = 5000.0
    job.phases.leave()
    job.hooks.on_generation_end()

    reading = job.step()

    assert reading.generation_peaks == {}
    assert "generate" not in reading.detail.phase_peaks["cpu"]
    assert 5000.0 not in reading.detail.phase_peaks["cpu"].values()


def test_a_peak_that_another_thread_has_read_stays_that_of_its_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, detail_seconds=10.0)
    job.step()
    job.phases.enter(FORWARD)
    job.peak_bytes = 3000.0
    job.hooks._reader.read()
    job.peak_bytes = 600.0
    job.phases.leave()

    detail = job.step().detail

    assert detail.phase_peaks["cpu"]["forward"] == 3000.0


def test_of_very_many_shapes_the_largest_are_kept(job: Job) -> None:
    reading = job.step(*((2, length) for length in range(8, 800, 8)), (2, 4096), (2, 4))

    assert Shape(2, 4096) in reading.shapes
    assert len(reading.shapes) <= memory_hooks.MAX_SHAPES


def test_a_step_without_an_update_ends_no_detailed_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, detail_seconds=10.0)
    job.step()
    job.clock.seconds += 1

    reading = job.hooks.on_step_end()

    assert reading.detail is None


def test_after_close_no_phase_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, detail_seconds=10.0)
    job.step()

    job.hooks.close()

    assert job.phases.on_change is None
