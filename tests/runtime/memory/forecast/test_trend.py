"""Lines fitted to series with known slopes, levels and noise, against closed forms."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from zerowatch.runtime.memory.forecast.trend import Trend, fit_line, fit_trend, upper_median

Series = npt.NDArray[np.float64]


def numbers(count: int) -> Series:
    return np.arange(count, dtype=float)


@pytest.mark.parametrize(
    ("values", "expected"), [([7.0], 7), ([1.0, 9.0], 9), ([9, 1, 5], 5), ([4, 8, 2, 6], 6)]
)
def test_the_upper_median_is_the_upper_one_of_the_two_in_the_middle(
    values: list[float], expected: float
) -> None:
    assert upper_median(np.array(values, dtype=float)) == expected


def test_a_series_of_eleven_readings_has_the_level_of_its_last_five_and_no_slope() -> None:
    values = np.array([90, 80, 70, 60, 50, 40, 11, 17, 13, 19, 15], dtype=float)

    trend = fit_trend(numbers(11), values, 3.0)

    assert trend == Trend(level=15, noise=3.0, points=11)


def test_the_deviations_of_an_exact_line_are_those_of_the_smallest_noise() -> None:
    # A reading every 5 steps, 2 bytes more each: 0.4 bytes per step, with noise of at least 3.
    steps = 100 + 5 * numbers(32)

    trend = fit_line(steps, 7 + 2 * numbers(32), 3.0)

    # Blocks have two readings, and the upper one is their median: the level is a reading too high.
    assert trend.slope == pytest.approx(0.4)
    assert trend.level == pytest.approx(7 + 2 * 31 + 1)
    assert (trend.noise, trend.points) == (3.0, 32)
    # Of least squares: sigma sqrt(12 / n^3) for the slope per reading, 2 sigma / sqrt(n) for its
    # end. The slope of medians is 1.1 times as uncertain.
    assert trend.slope_deviation == pytest.approx(1.1 * 3 * math.sqrt(12 / 32**3) / 5)
    assert trend.level_deviation == pytest.approx(3 * 2 / math.sqrt(32))
    # 16 blocks, each 4 above the last: a step in the middle leaves 4^2 (340 - 256) of squares.
    assert trend.stepwise == pytest.approx((36 / (16 * 84 + 36)) ** 8 / 16)


def test_a_long_exact_line_is_assumed_to_hide_a_little_autocorrelation() -> None:
    trend = fit_line(numbers(48), 7 + 2 * numbers(48), 1.0)

    hidden = (2 / 48) / (1 - 4 / 48)  # Marriott and Pope
    inflation = (1 + hidden) / (1 - hidden)
    assert (trend.slope, trend.level, trend.noise) == (2, pytest.approx(7 + 2 * 47), 1)
    assert trend.slope_deviation == pytest.approx(1.1 * math.sqrt(12 * inflation / 48**3))
    assert trend.level_deviation == pytest.approx(math.sqrt(4 * inflation / 48))
    independent = (1 - hidden**3) / (1 + hidden**3)  # of blocks of three readings
    assert trend.stepwise == pytest.approx((4 / (36 * 84 + 4)) ** (8 * independent) / 16)


def test_one_sudden_step_is_more_likely_a_step_than_a_line(seed: int) -> None:
    noise = np.random.default_rng(seed).standard_normal(160)
    step = np.where(numbers(160) < 70, 100.0, 110.0)

    odds = [fit_line(numbers(160), each + noise, 1.0).stepwise for each in (step, numbers(160) / 8)]

    assert odds[0] > 10 > 1e-4 > odds[1]


def test_a_line_ignores_single_outliers() -> None:
    values = 500 + 3 * numbers(80)
    values[[7, 30, 31, 77]] += (400, -900, 300, 5000)

    trend = fit_line(numbers(80), values, 1.0)

    assert trend.slope == pytest.approx(3)
    assert trend.level == pytest.approx(500 + 3 * 79)
    assert trend.noise == 1.0


def with_memory(memory: float, rng: np.random.Generator, count: int) -> Series:
    """Return 100 rows of noise of deviation 1 with this autocorrelation."""
    noise = rng.standard_normal((100, count))
    for each in range(1, count):
        noise[:, each] = memory * noise[:, each - 1] + (1 - memory**2) ** 0.5 * noise[:, each]
    return noise


@pytest.mark.parametrize(("memory", "count"), [(0.0, 64), (0.0, 160), (0.6, 256)])
def test_the_deviations_are_those_of_the_errors(memory: float, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    trends = [
        fit_line(numbers(count), 0.05 * numbers(count) + noise, 0.01)
        for noise in with_memory(memory, rng, count)
    ]

    slopes = np.array([trend.slope - 0.05 for trend in trends])
    levels = np.array([trend.level for trend in trends])
    assert slopes.mean() == pytest.approx(0, abs=0.3 * slopes.std())
    assert np.mean([each.slope_deviation for each in trends]) == pytest.approx(
        1.12 * slopes.std(), rel=0.25
    )
    assert np.mean([each.level_deviation for each in trends]) == pytest.approx(
        levels.std(), rel=0.25
    )
    assert np.mean([each.noise for each in trends]) == pytest.approx(1, rel=0.12)


def test_a_leak_is_fitted_from_where_it_starts(seed: int) -> None:
    noise = np.random.default_rng(seed).standard_normal(400)
    leak = 10 * np.maximum(0, numbers(400) - 300)

    trend = fit_trend(numbers(400), 9000 + leak + noise, 0.5)

    assert 32 <= trend.points <= 128
    assert trend.slope == pytest.approx(10, rel=0.02)
    assert trend.level == pytest.approx(9000 + 990, abs=10)


@pytest.mark.parametrize("count", [12, 20, 41, 83, 600])
def test_a_series_that_is_one_line_is_used_whole(count: int, seed: int) -> None:
    noise = np.random.default_rng(seed).standard_normal(count)

    trend = fit_trend(numbers(count), 1000 + 5 * numbers(count) + noise, 0.5)

    assert trend.points == count


def test_growth_in_chunks_is_a_line_over_a_long_stretch() -> None:
    values = 1000 + 60.0 * (numbers(400) // 20)

    trend = fit_trend(numbers(400), values, 1.0)

    assert trend.points >= 48
    assert trend.slope == pytest.approx(3, rel=0.05)


def test_after_a_jump_there_is_no_slope() -> None:
    values = np.where(numbers(200) < 150, 1000.0, 5000.0)

    trend = fit_trend(numbers(200), values, 1.0)

    assert (trend.level, trend.slope) == (5000, 0)
    assert trend.points == 64
