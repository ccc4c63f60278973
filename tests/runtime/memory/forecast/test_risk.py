"""The probability of exceeding the limit, against worked examples.

That it is calibrated on generated runs is tested in `test_forecast_risk.py`.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from zerowatch.runtime.memory.forecast.risk import (
    ErrorTail,
    Growth,
    combine_trends,
    fit_tail,
    growing_weight,
    risk_ahead,
)
from zerowatch.runtime.memory.forecast.trend import Trend

RANKS = (0.025, 0.075, 0.125, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.875, 0.925, 0.95)
NORMAL = (-1.96, -1.44, -1.15, -0.84, -0.52, -0.25, 0.0, 0.25, 0.52, 0.84, 1.15, 1.44, 1.645)
# Errors from 40 to 160 bytes, with a median of 100.
TAIL = ErrorTail(errors=tuple(range(40, 170, 10)), ranks=RANKS, scale=20.0, shape=0.5, width=30.0)


@pytest.mark.parametrize(
    ("margin", "expected"),
    [
        (20.0, 1 - 0.025 / 2**3),  # a scale below the first error
        (40.0, 1 - 0.025),
        (45.0, 1 - 0.05),  # half way between two quantiles
        (100.0, 0.5),
        (112.5, 1 - 0.625),
        (159.9, 1 - 0.94975),
        (160.0, 0.05),
        (200.0, 0.05 / 4),  # (1 + 0.5 * 40 / 20) ** -2
        (1e12, 1e-9),
        (-1e12, 1 - 1e-9),
    ],
)
def test_the_probability_of_an_error_beyond_a_margin(margin: float, expected: float) -> None:
    assert TAIL.exceedance(margin) == pytest.approx(expected, rel=1e-12)
    assert TAIL.exceedances(np.array([margin])) == pytest.approx([expected], rel=1e-12)


def test_noise_widens_the_errors_around_their_median() -> None:
    wide = TAIL.widened(40.0)  # 30 and 40 add up to 50

    assert wide.errors == pytest.approx([100 + (each - 100) * 5 / 3 for each in TAIL.errors])
    assert wide.ranks == RANKS
    assert (wide.scale, wide.width) == (pytest.approx(20 * 5 / 3), pytest.approx(50))
    assert wide.shape == 0.5


def test_without_errors_the_expected_width_is_that_of_a_normal_distribution() -> None:
    tail = fit_tail([], expected=50.0, min_width=7.0)

    assert tail.errors == pytest.approx([50 * each for each in NORMAL])
    assert tail.ranks == RANKS
    assert (tail.width, tail.shape) == (50, 0.15)
    assert tail.scale == pytest.approx(0.4 * 50)


def test_few_errors_count_by_their_number_against_ten_expected_ones() -> None:
    tail = fit_tail([70.0, 30.0, 50.0, 40.0, 60.0], expected=100.0, min_width=1.0)

    deviation = (60 - 40) / 1.35  # of the quartiles, larger than that of the outer quantiles
    width = math.sqrt((5 * deviation**2 + 10 * 100**2) / 15)
    assert tail.width == pytest.approx(width)
    assert tail.errors == pytest.approx([25 + width * each for each in NORMAL])


@pytest.mark.parametrize(("count", "is_shrunk"), [(29, True), (30, False)])
def test_from_thirty_errors_on_their_own_width_counts(count: int, is_shrunk: bool) -> None:
    errors = [8.0 if number % 2 else -8.0 for number in range(count)]

    tail = fit_tail(errors, expected=1000.0, min_width=1.0)

    assert (tail.width > 400) == is_shrunk
    if not is_shrunk:
        assert tail.width == pytest.approx(16 / 1.35)


def test_the_quantiles_of_many_errors_are_those_of_the_sample() -> None:
    tail = fit_tail(np.arange(40.0)[::-1], expected=1e6, min_width=0.001)

    width = (29.25 - 9.75) / 1.35  # between the quartiles
    assert tail.errors == pytest.approx([40 * rank - 0.5 for rank in RANKS])
    assert tail.width == pytest.approx(width)
    # Two errors, 38 and 39, are above 37.5, and count with three of the expected size.
    assert tail.scale == pytest.approx(((0.5 + 1.5) * 0.85 + 3 * 0.4 * width) / 5)
    assert tail.shape == 0.15


def test_a_tail_of_ten_errors_is_fitted_and_shrunk_and_never_shorter_than_exponential() -> None:
    tail = fit_tail(np.arange(200.0), expected=1e6, min_width=0.001)

    assert tail.errors[-1] == pytest.approx(200 * 0.95 - 0.5)
    assert tail.shape == 0.01  # ten evenly spaced errors have a much shorter one
    assert tail.scale == pytest.approx(5.0 * (1 - 0.01))  # 5 is the mean of 0.5, 1.5 ... 9.5


def test_the_shape_of_ten_errors_in_the_tail_weighs_a_third() -> None:
    excesses = [1.0, 1, 2, 2, 4, 4, 8, 16, 24, 48]
    errors = [*np.linspace(-100, 100, 190), *(100.5 + np.array(excesses))]

    tail = fit_tail(errors, expected=1.0, min_width=0.001)

    threshold = tail.errors[-1]
    beyond = [each - threshold for each in errors if each > threshold]
    first = sum(beyond) / 10
    second = sum(each * (1 - (i + 0.65) / 10) for i, each in enumerate(beyond)) / 10
    shape = (2 - first / (first - 2 * second) + 2 * 0.15) / 3
    assert (len(beyond), 0.15 < shape < 0.5) == (10, True)
    assert tail.shape == pytest.approx(shape)
    assert tail.scale == pytest.approx(first * (1 - shape))


def test_the_tail_of_wild_errors_is_at_most_of_infinite_variance() -> None:
    errors = [*np.linspace(-1, 1, 950), *(2.0 + 1.5 ** np.arange(50))]

    assert fit_tail(errors, expected=1.0, min_width=0.001).shape == 0.5


def test_errors_are_at_least_as_wide_as_readings_are_coarse() -> None:
    tail = fit_tail([3.0] * 40, expected=1.0, min_width=10.0)

    assert tail.errors == pytest.approx([3 + 10 * each for each in NORMAL])
    assert (tail.width, tail.scale) == (10, pytest.approx(4))


GROWING = Trend(level=0.0, slope=6.0, slope_deviation=2.0, points=8, stepwise=0.25)


def test_the_probability_of_growth_follows_bayes_rule() -> None:
    # Student's t with 8 / 2 - 2 degrees of freedom, of a score of 3; the typical slope is that of
    # 2 % of 5000 bytes in 50 steps, 2 bytes; the prior odds are 1 to 10.
    odds = (1 + 9 / 2) ** 1.5 / math.sqrt(1 + 1) / 10
    lasts = 24 / (24 + 24)  # 8 readings of 3 steps, against 24 steps

    weight = growing_weight(GROWING, 5000.0, 3.0)

    assert weight == pytest.approx(lasts * odds / (1 + odds) / 1.25)


@pytest.mark.parametrize(("slope", "deviation"), [(0.0, 1.0), (-5.0, 1.0), (5.0, 0.0)])
def test_without_a_rising_uncertain_line_there_is_no_growth(slope: float, deviation: float) -> None:
    trend = Trend(level=0.0, slope=slope, slope_deviation=deviation, points=99)

    assert growing_weight(trend, 5000.0, 1.0) == 0.0


def test_a_long_line_has_at_most_fourteen_degrees_of_freedom() -> None:
    trend = Trend(level=0.0, slope=3.0, slope_deviation=1.0, points=96)

    odds = (1 + 9 / 14) ** 7.5 / math.sqrt(1 + 4) / 10
    assert growing_weight(trend, 5000.0, 1.0) == pytest.approx(96 / 120 * odds / (1 + odds))


def test_the_growths_of_two_parts_add_up_by_their_probabilities() -> None:
    other = Trend(level=0.0, slope=30.0, slope_deviation=8.0, points=40)
    one, two = growing_weight(GROWING, 5000.0, 3.0), growing_weight(other, 5000.0, 3.0)

    growth = combine_trends((GROWING, Trend(level=5.0), other), 5000.0, 3.0)

    assert 0.1 < one < two < 0.99
    assert growth.weight == pytest.approx(1 - (1 - one) * (1 - two))
    assert growth.slope == pytest.approx((one * 6 + two * 30) / growth.weight)
    assert growth.deviation == pytest.approx(math.sqrt((one * 4 + two * 64) / growth.weight))


def test_unlikely_growth_counts_as_none() -> None:
    assert combine_trends((Trend(level=1.0), Trend(level=2.0)), 5000.0, 1.0) == Growth()


def test_a_steady_need_has_the_risk_of_the_readings_to_come() -> None:
    # 50 steps are 10 readings, of which each exceeds the limit with 5 %. One past reading was
    # expected above the limit and was not, which halves them. 75 of 150 steps are known.
    risk = risk_ahead(
        np.array([160.0]), np.ones(1), TAIL, Growth(), per_reading=5.0, survived=1.0, known=75.0
    )

    assert risk == pytest.approx(0.87 * 0.5 * (1 - 0.95**5))


def test_kinds_of_readings_count_by_their_shares() -> None:
    margins, shares = np.array([160.0, 200.0, 100.0]), np.array([0.5, 0.4, 0.1])

    risk = risk_ahead(margins, shares, TAIL, Growth(), per_reading=10.0, survived=0.0, known=900.0)

    each = 0.5 * 0.05 + 0.4 * 0.0125 + 0.1 * 0.5
    assert risk == pytest.approx(0.87 * (1 - (1 - each) ** 5))


def test_growth_lowers_the_margins_of_the_steps_to_come() -> None:
    growth = Growth(slope=0.8, deviation=0.4, weight=0.6)

    risk = risk_ahead(
        np.array([200.0]), np.ones(1), TAIL, growth, per_reading=2.0, survived=0.0, known=30.0
    )

    steady = 1 - (1 - TAIL.exceedance(200.0)) ** 25
    growing = 0.0
    nodes = {-2.857: 0.01126, -1.356: 0.22208, 0.0: 0.53332, 1.356: 0.22208, 2.857: 0.01126}
    for node, weight in nodes.items():
        slope = max(0.8 + 0.4 * node, 0.0)
        survival = 1.0
        for part in range(8):  # 25 readings in 8 parts, each at its middle
            middle = (part + 0.5) * 50 / 8
            survival *= (1 - TAIL.exceedance(200.0 - slope * middle)) ** (25 / 8)
        growing += weight * (1 - survival)
    expected = 0.87 * (0.4 * steady * 30 / 150 + 0.6 * growing * 30 / 40)
    assert risk == pytest.approx(expected, rel=1e-9)


def test_the_risk_is_never_certain() -> None:
    risk = risk_ahead(
        np.array([-1e9]), np.ones(1), TAIL, Growth(), per_reading=50.0, survived=0.0, known=999.0
    )

    assert risk == pytest.approx(0.87, abs=1e-5)
