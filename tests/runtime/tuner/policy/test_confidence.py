"""Confidence bounds of a mean."""

from __future__ import annotations

import pytest

from zerowatch.runtime.tuner.policy.confidence import MIN_ERROR, student_quantile, winsorized_mean


@pytest.mark.parametrize(
    ("probability", "freedom", "quantile"),  # from printed tables
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.99, 7, 2.998),
        (0.995, 15, 2.947),
        (0.999, 4, 7.173),
        (0.975, 30, 2.042),
        (0.5, 5, 0.0),
    ],
)
def test_quantiles_are_those_of_students_t(
    probability: float, freedom: int, quantile: float
) -> None:
    assert student_quantile(probability, freedom) == pytest.approx(quantile, abs=6e-4)


def test_few_differences_are_not_winsorized() -> None:
    found = winsorized_mean([1.0, 2.0, 3.0, 6.0])

    assert found.mean == 3.0
    assert found.error - MIN_ERROR == pytest.approx((14 / 3) ** 0.5 / 2)
    assert found.freedom == 3


def test_eight_differences_are_winsorized_with_fewer_degrees_of_freedom() -> None:
    found = winsorized_mean([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 1000.0])

    assert found.mean == pytest.approx((2 + 2 + 3 + 4 + 5 + 6 + 7 + 7) / 8)
    assert found.freedom == 5


def test_stricter_bounds_are_wider() -> None:
    found = winsorized_mean([0.01, 0.02, 0.03, 0.02])

    assert found.lower(0.001) < found.lower(0.05) < found.mean < found.upper(0.05)


def test_equal_differences_are_not_certain() -> None:
    found = winsorized_mean([0.02] * 4)

    assert found.lower(0.05) < 0.02 < found.upper(0.05)
