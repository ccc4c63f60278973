"""Tests of the input of the forecasts, which is read from a step's sample."""

from __future__ import annotations

import pytest

from zerowatch.runtime.memory.forecast.peak_readings import Shape
from zerowatch.runtime.memory.step_sample import StepMemorySample


def test_a_micro_batch_that_another_exceeds_in_both_sizes_is_dropped() -> None:
    shapes = (Shape(4, 16), Shape(2, 64), Shape(4, 32), Shape(2, 8), Shape(1, 64), Shape(1, 128))

    points = StepMemorySample(readings={"cpu": {"allocated": 1.0}}, shapes=shapes).points(3)

    assert set(points["cpu"].shapes) == {Shape(4, 32), Shape(2, 64), Shape(1, 128)}


@pytest.mark.parametrize(
    ("peak", "lost"),
    [
        (28.0, 12.0),  # the peak used 24 of the 36 free bytes between steps
        (2.0, 36.0),
        (41.0, 0.0),
    ],
)
def test_free_pieces_that_the_peak_used_are_not_lost(peak: float, lost: float) -> None:
    states = {"allocated": 4.0, "peak_allocated": peak, "peak_reserved": 40.0, "unusable": 36.0}

    point = StepMemorySample(readings={"cuda:0": states}, shapes=()).points(3)["cuda:0"]

    assert (point.peak_bytes, point.fragmented_bytes) == (peak, lost)


def test_missing_states_have_defaults() -> None:
    states = {"allocated": 5.0}

    point = StepMemorySample(readings={"cpu": states}, shapes=()).points(3)["cpu"]

    assert (point.step, point.peak_bytes, point.between_steps_bytes) == (3, 5.0, 5.0)
    assert point.limit_bytes == float("inf")
    assert (point.reserved_bytes, point.fragmented_bytes) == (5.0, 0.0)
