"""Tests of memory metrics: states, fragmentation, phases, categories and recent peaks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zerowatch.metrics.catalog import memory
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.memory.forecast.peak_readings import Shape
from zerowatch.runtime.memory.memory_metrics import PEAK_SECONDS, MemoryMetrics, SlidingMax
from zerowatch.runtime.memory.step_sample import DetailedSample, StepMemorySample

HELD_BEFORE = {"cpu": {"parameters": 100, "gradients": 80, "optimizer": 300, "comm_buffers": 40}}
HELD_AFTER = {"cpu": {"parameters": 100, "gradients": 0, "optimizer": 300, "comm_buffers": 40}}


def sample(detail: DetailedSample | None = None, **states: float) -> StepMemorySample:
    return StepMemorySample(readings={"cpu": states}, shapes=(Shape(2, 8),), detail=detail)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def metrics(recorder: Recorder) -> MemoryMetrics:
    return MemoryMetrics(recorder, {"cpu": 1000.0})


def test_fragmentation_and_retries_have_separate_metrics(
    recorder: Recorder, metrics: MemoryMetrics
) -> None:
    metrics.publish(sample(allocated=1500.0, unusable=20.0, alloc_retries=3.0))

    values = recorder.snapshot().values
    assert values[memory.MEMORY_BYTES] == {("cpu", "allocated"): 1500.0}
    assert values[memory.MEMORY_FRAGMENTATION] == {("cpu",): 20.0}
    assert values[memory.ALLOC_RETRIES] == {("cpu",): 3.0}


def test_free_memory_that_the_peak_used_is_not_fragmented(
    recorder: Recorder, metrics: MemoryMetrics
) -> None:
    peaks = {"peak_allocated": 28.0, "peak_reserved": 40.0}

    metrics.publish(sample(allocated=4.0, unusable=36.0, **peaks))

    assert recorder.snapshot().values[memory.MEMORY_FRAGMENTATION] == {("cpu",): 12.0}


def test_a_peak_is_published_until_a_scrape_must_have_read_it(
    recorder: Recorder, metrics: MemoryMetrics
) -> None:
    for peak in (1700.0, 1900.0, 1600.0):
        metrics.publish(sample(allocated=1500.0, peak_allocated=peak))

    assert recorder.snapshot().values[memory.MEMORY_PEAK] == {("cpu", "allocated"): 1900.0}


def test_a_peak_before_a_change_of_memory_use_is_published(
    recorder: Recorder, metrics: MemoryMetrics
) -> None:
    after = sample(allocated=1500.0, peak_allocated=1700.0)

    metrics.publish(replace(after, earlier_peaks={"cpu": {"peak_allocated": 1900.0}}))

    values = recorder.snapshot().values
    assert values[memory.MEMORY_PEAK] == {("cpu", "allocated"): 1900.0}
    assert values[memory.MEMORY_BYTES] == {("cpu", "allocated"): 1500.0}


def test_the_peak_of_generation_is_a_phase_and_part_of_the_highest_use(
    recorder: Recorder, metrics: MemoryMetrics
) -> None:
    training = sample(allocated=1500.0, peak_allocated=1700.0)
    peaks = {"cpu": {"peak_allocated": 2500.0}}

    metrics.publish(replace(training, generation_peaks=peaks))

    values = recorder.snapshot().values
    assert values[memory.MEMORY_PHASE_PEAK] == {("cpu", "generate"): 2500.0}
    assert values[memory.MEMORY_PEAK] == {("cpu", "allocated"): 2500.0}
    assert values[memory.MEMORY_BYTES] == {("cpu", "allocated"): 1500.0}


def test_the_limit_is_a_metric_apart_from_usage(recorder: Recorder, metrics: MemoryMetrics) -> None:
    metrics.publish(sample(allocated=1500.0, limit=4000.0))

    values = recorder.snapshot().values
    assert values[memory.MEMORY_LIMIT] == {("cpu",): 4000.0}
    assert values[memory.MEMORY_BYTES] == {("cpu", "allocated"): 1500.0}


def test_the_categories_of_a_detailed_sample_add_up_to_its_peak(
    recorder: Recorder, metrics: MemoryMetrics
) -> None:
    detail = DetailedSample(
        phase_peaks={"cpu": {"forward": 1700.0, "backward": 1900.0, "optimizer": 2500.0}},
        held_before=HELD_BEFORE,
        held_after=HELD_AFTER,
        heap_free_bytes=15,
    )

    metrics.publish(sample(detail, allocated=1500.0, peak_allocated=2500.0))

    values = recorder.snapshot().values
    categories = {name: size for (_, name), size in values[memory.MEMORY_CATEGORY_BYTES].items()}
    assert sum(categories.values()) == 1900.0 - 1000.0
    assert categories["gradients"] == 80.0
    assert categories["other"] == 1500.0 - 15 - 1000.0 - 440.0
    assert values[memory.MEMORY_PHASE_PEAK]["cpu", "backward"] == 1900.0
    assert metrics.categories["cpu"] == categories


def test_a_sample_without_detail_does_not_change_the_categories(
    recorder: Recorder, metrics: MemoryMetrics
) -> None:
    metrics.publish(sample(allocated=1500.0))

    assert memory.MEMORY_CATEGORY_BYTES not in recorder.snapshot().values


def test_a_peak_stays_for_a_minute_and_then_the_next_highest_counts() -> None:
    now = [0.0]
    peak = SlidingMax(lambda: now[0])

    seen = []
    for time, value in ((0, 5.0), (10, 9.0), (20, 3.0), (30, 4.0), (10 + PEAK_SECONDS + 1, 2.0)):
        now[0] = time
        seen.append(peak.add(value))

    assert seen == [5.0, 9.0, 9.0, 9.0, 4.0]
