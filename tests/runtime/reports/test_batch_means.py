"""Tests of the error of a mean of autocorrelated values; covers `batch_means.py`."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from zerowatch.runtime.reports.batch_means import MIN_VALUES, mean_error


def noise(seed: int, size: int, autocorrelation: float) -> NDArray[np.float64]:
    """First-order autoregressive noise whose true mean is 0."""
    values = np.random.default_rng(seed).normal(size=size + 300)
    for index in range(1, len(values)):
        values[index] += autocorrelation * values[index - 1]
    return values[300:]


@pytest.mark.parametrize("autocorrelation", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("size", [80, 400])
def test_few_intervals_miss_the_true_mean(autocorrelation: float, size: int) -> None:
    missed = 0
    for seed in range(200):
        values = noise(seed, size, autocorrelation)
        error = mean_error(values)
        missed += error is not None and abs(values.mean()) > error.half_width(0.05)

    assert missed <= 16  # 5 % of 200, and two standard deviations


def test_independent_values_have_the_usual_error() -> None:
    errors = [mean_error(noise(seed, 1000, 0.0)) for seed in range(20)]

    known = [error.standard_error for error in errors if error is not None]
    assert len(known) == 20
    assert np.mean(known) == pytest.approx(1 / np.sqrt(1000), rel=0.3)


def test_too_few_values_and_a_drift_have_no_error() -> None:
    assert mean_error(noise(0, MIN_VALUES - 1, 0.0)) is None
    assert mean_error(noise(0, 100, 0.0) * 0.01 + np.linspace(0, 1, 100)) is None


def test_equal_values_have_no_uncertainty() -> None:
    error = mean_error(np.full(100, 0.5))

    assert error is not None
    assert error.half_width(0.05) == 0


def test_values_that_alternate_have_the_error_of_independent_ones() -> None:
    values = np.tile([-1.0, 1.0], 80)  # a negative autocorrelation counts as none

    error = mean_error(values)

    assert error is not None
    assert error.freedom == 15  # of 16 batches, whose means are equal
    assert error.standard_error == pytest.approx(np.sqrt(160 / 159 / 160))
    assert error.half_width(0.05) == pytest.approx(2.13145 * error.standard_error, rel=1e-5)


def test_slow_variation_has_the_error_of_fewer_independent_values() -> None:
    values = np.repeat(np.tile([-1.0, 1.0], 8), 10)  # as long as the batches

    error = mean_error(values)

    lag_1 = (144 - 15) / 160  # 159 pairs of neighbors, of which 15 differ
    lag_1 += (1 + 3 * lag_1) / 160
    independent = 160 * (1 - lag_1) / (1 + lag_1)  # 15.09
    assert error is not None
    assert error.standard_error == pytest.approx(np.sqrt(160 / 159 / independent))
    assert error.freedom == 14


def test_the_oldest_values_are_in_no_batch() -> None:
    late = np.concatenate([[5.0] * 3, np.tile([-1.0, 1.0], 32)])

    error = mean_error(late)

    # The batches of 4 values have equal means, so the error is that of the values.
    deviations = late - late.mean()
    lag_1 = float(deviations[:-1] @ deviations[1:] / (deviations @ deviations))
    lag_1 = max(0.0, lag_1 + (1 + 3 * lag_1) / 67)
    independent = 67 * (1 - lag_1) / (1 + lag_1)
    assert error is not None
    assert error.standard_error == pytest.approx(late.std(ddof=1) / np.sqrt(independent))


@pytest.mark.parametrize(("number", "is_known"), [(MIN_VALUES - 1, False), (MIN_VALUES, True)])
def test_sixty_four_values_are_enough(number: int, is_known: bool) -> None:
    assert MIN_VALUES == 64
    assert (mean_error(np.tile([-1.0, 1.0], 50)[:number]) is not None) is is_known
