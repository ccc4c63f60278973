"""From readings to metrics: states, fragmentation, phases and categories."""

from __future__ import annotations

import pytest

from zerowatch.metrics.catalog import memory
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.memory.forecast.series import Shape
from zerowatch.runtime.memory.metrics import MemoryMetrics
from zerowatch.runtime.memory.step_sample import DetailedSample, StepMemorySample

HELD_BEFORE = {"cpu": {"parameters": 100, "gradients": 80, "optimizer": 300, "comm_buffers": 40}}
HELD_AFTER = {"cpu": {"parameters": 100, "gradients": 0, "optimizer": 300, "comm_buffers": 40}}


def reading(look: DetailedSample | None = None, **states: float) -> StepMemorySample:
    return StepMemorySample(readings={"cpu": states}, shapes=(Shape(2, 8),), look=look)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def figures(recorder: Recorder) -> MemoryMetrics:
    return MemoryMetrics(recorder, {"cpu": 1000.0})


def test_what_is_unusable_and_what_was_retried_have_metrics_of_their_own(
    recorder: Recorder, figures: MemoryMetrics
) -> None:
    figures.publish(reading(allocated=1500.0, unusable=20.0, alloc_retries=3.0))

    values = recorder.snapshot().values
    assert values[memory.MEMORY_BYTES] == {("cpu", "allocated"): 1500.0}
    assert values[memory.MEMORY_FRAGMENTATION] == {("cpu",): 20.0}
    assert values[memory.ALLOC_RETRIES] == {("cpu",): 3.0}


def test_a_peak_shows_until_a_scrape_must_have_read_it(
    recorder: Recorder, figures: MemoryMetrics
) -> None:
    for peak in (1700.0, 1900.0, 1600.0):
        figures.publish(reading(allocated=1500.0, peak_allocated=peak))

    assert recorder.snapshot().values[memory.MEMORY_BYTES]["cpu", "peak_allocated"] == 1900.0


def test_the_categories_of_a_look_add_up_to_its_peak(
    recorder: Recorder, figures: MemoryMetrics
) -> None:
    look = DetailedSample(
        phase_peaks={"cpu": {"forward": 1700.0, "backward": 1900.0, "optimizer": 2500.0}},
        held_before=HELD_BEFORE,
        held_after=HELD_AFTER,
        heap_free_bytes=15,
    )

    figures.publish(reading(look, allocated=1500.0, peak_allocated=2500.0))

    values = recorder.snapshot().values
    categories = {name: size for (_, name), size in values[memory.MEMORY_CATEGORY_BYTES].items()}
    assert sum(categories.values()) == 1900.0 - 1000.0
    assert categories["gradients"] == 80.0
    assert categories["other"] == 1500.0 - 15 - 1000.0 - 440.0
    assert values[memory.MEMORY_PHASE_PEAK]["cpu", "backward"] == 1900.0
    assert figures.categories["cpu"] == categories


def test_a_step_that_was_not_looked_at_leaves_categories_as_they_are(
    recorder: Recorder, figures: MemoryMetrics
) -> None:
    figures.publish(reading(allocated=1500.0))

    assert memory.MEMORY_CATEGORY_BYTES not in recorder.snapshot().values
