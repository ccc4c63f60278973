"""Fits the recent linear trend of a series: a robust slope, its deviation and its duration.

A line is fitted to medians of blocks by Theil and Sen's median of slopes. Single outliers therefore
do not look like a trend. Several stretches that end at the last reading are compared. The longest
stretch that agrees with all shorter stretches is chosen (Lepski's rule). The chosen stretch does
not reach back beyond the start of a leak, a jump or a plateau.

Autocorrelated noise looks like a trend on a short stretch. The autocorrelation is estimated from
the correlation of differences, as for a first-order autoregression.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from ...common.gil_pauses import let_training_run

Array = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int_]
# For a shorter series only a level is computed, without a trend.
MIN_POINTS = 12
# Lengths of the stretches that are compared, in readings.
STRETCHES = (16, 32, 64, 128, 256, 512)
# A line is fitted to the medians of at most this many blocks of readings.
BLOCKS = 16
# The slopes or levels of two stretches disagree if they differ by more than DISAGREEMENT deviations
# plus a slack. The slack is ESTIMATE_SLACK divided by the readings of the shorter stretch, because
# the deviation of this stretch is itself an estimate.
DISAGREEMENT = 3.0
ESTIMATE_SLACK = 24.0
# Differences are clipped at this many deviations, because jumps are rare.
CLIPPED_AT = 5.0
# Upper bound of the estimated autocorrelation of the noise.
MAX_MEMORY = 0.98
# A stretch of this length has a reliable noise estimate. A longer stretch with more noise is not a
# line.
CERTAIN_POINTS = 48
MAX_NOISE_RATIO = 1.4
# A line is certain if its slope is at least this many deviations, and if the odds of a sudden step
# are at most this large.
CERTAIN_SCORE = 6.0
CERTAIN_STEPWISE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A line through the last readings of a series, in units of the series.

    Attributes:
        level: Value at the last reading.
        slope: Growth per step.
        level_deviation, slope_deviation: Standard deviations of `level` and `slope`.
        noise: Standard deviation of single readings around the line.
        points: Number of readings that the line is fitted to.
        stepwise: Odds that the series has one sudden step rather than the slope of the line.
    """

    level: float
    slope: float = 0.0
    level_deviation: float = 0.0
    slope_deviation: float = 0.0
    noise: float = 0.0
    points: int = 0
    stepwise: float = 0.0


def fit_trend(steps: Array, values: Array, min_noise: float) -> Trend:
    """Return the trend at the end of a series.

    Args:
        steps: [n] step numbers, ascending.
        values: [n] one value for each step.
        min_noise: Lower bound of the noise of single readings.
    """
    count = len(values)
    if count < MIN_POINTS:
        return Trend(level=upper_median(values[-5:]), noise=min_noise, points=count)
    lengths = [*(one for one in STRETCHES if 1.3 * one < count), count]
    memory = _memory_of_differences(values, min_noise)
    chosen = _longest(steps, values, lengths, min_noise, memory)
    if chosen.points >= CERTAIN_POINTS or count < 2 * CERTAIN_POINTS:
        return chosen
    # On a short stretch, growth in chunks looks constant.
    certain = [length for length in lengths if length >= CERTAIN_POINTS]
    longer = _longest(steps, values, certain, min_noise, memory)
    return longer if _is_certain(longer, values) else chosen


def fit_line(steps: Array, values: Array, min_noise: float) -> Trend:
    """Return the line fitted to a whole series of at least `MIN_POINTS` readings."""
    return _line(steps, values, min_noise, _memory_of_differences(values, min_noise))


def _longest(
    steps: Array, values: Array, lengths: Sequence[int], min_noise: float, memory: float
) -> Trend:
    """Return the longest stretch that agrees with all shorter stretches."""
    chosen: list[Trend] = []
    for length in lengths:
        let_training_run()
        trend = _line(steps[-length:], values[-length:], min_noise, memory)
        if not all(_agree(trend, shorter) for shorter in chosen):
            break
        chosen.append(trend)
    return chosen[-1]


def _is_certain(trend: Trend, values: Array) -> bool:
    """Return whether a line is certain, and whether the last readings still lie on the line."""
    off = abs(upper_median(values[-9:]) - trend.level)
    return (
        trend.slope > CERTAIN_SCORE * trend.slope_deviation
        and trend.stepwise < CERTAIN_STEPWISE
        and off < 3 * trend.noise
    )


def _agree(longer: Trend, shorter: Trend) -> bool:
    slopes = (longer.slope_deviation**2 + shorter.slope_deviation**2) ** 0.5
    levels = (longer.level_deviation**2 + shorter.level_deviation**2) ** 0.5
    far = DISAGREEMENT + ESTIMATE_SLACK / shorter.points
    return (
        abs(longer.slope - shorter.slope) <= far * slopes
        and abs(longer.level - shorter.level) <= far * levels
        and (shorter.points < CERTAIN_POINTS or longer.noise <= MAX_NOISE_RATIO * shorter.noise)
    )


def _memory_of_differences(values: Array, least: float) -> float:
    """Return the autocorrelation of the noise per reading. A steady slope has no effect."""
    differences = np.diff(values)
    differences -= upper_median(differences)
    typical = max(1.4826 * upper_median(np.abs(differences)), least)
    clipped = np.clip(differences, -CLIPPED_AT * typical, CLIPPED_AT * typical)
    squares = float(clipped @ clipped)
    if squares < len(clipped) * least**2:  # all differences are below the resolution
        return 0.0
    correlation = float(clipped[1:] @ clipped[:-1]) / squares
    return min(max(1 + 2 * correlation, 0.0), MAX_MEMORY)


def _memory_of_residuals(residuals: Array, memory: float) -> float:
    """Return the autocorrelation of the residuals of a line. It is precise on a long stretch.

    Fitting a line lowers the autocorrelation by (2 + 4 memory) / n (Marriott and Pope 1954). The
    function corrects for this.
    """
    count = len(residuals)
    if count < CERTAIN_POINTS:
        return memory
    correlation = float(residuals[1:] @ residuals[:-1]) / max(float(residuals @ residuals), 1e-300)
    return min(max((correlation + 2 / count) / (1 - 4 / count), 0.0), MAX_MEMORY)


def _line(steps: Array, values: Array, min_noise: float, memory: float) -> Trend:
    """Fit one line to all readings."""
    count = len(values)
    blocks = min(BLOCKS, count // 2)
    size = count // blocks
    parts = values[-blocks * size :].reshape(blocks, size)
    medians = np.partition(parts, size // 2, axis=1)[:, size // 2]
    centres = steps[-blocks * size :].reshape(blocks, size).sum(axis=1) / size
    first, second = _pairs(blocks)
    slope = upper_median((medians[second] - medians[first]) / (centres[second] - centres[first]))
    offsets = centres - steps[-1]
    level = upper_median(medians - slope * offsets)
    residuals = values - level - slope * (steps - steps[-1])
    noise = max(1.4826 * upper_median(np.abs(residuals)), min_noise)
    residuals = np.clip(residuals, -CLIPPED_AT * noise, CLIPPED_AT * noise)
    memory = _memory_of_residuals(residuals, memory)
    width = max((float(residuals @ residuals) / count) ** 0.5, noise)
    inflation = (1 + memory) / (1 - memory)
    block_residuals = medians - level - slope * offsets
    squares = float(block_residuals @ block_residuals)
    kept = memory**size
    block_noise = (squares / (blocks - 2) * (1 + kept) / (1 - kept)) ** 0.5
    offsets -= offsets.sum() / blocks
    per_reading = float(steps[-1] - steps[0]) / (count - 1)
    slope_variance = max(
        block_noise**2 / float(offsets @ offsets),
        width**2 * min(12 * inflation / count**3, 2.4 * (1 - memory) / count) / per_reading**2,
    )
    return Trend(
        level=level,
        slope=slope,
        level_deviation=max(
            width * min(4 * inflation / count, 1.0) ** 0.5, 2 * block_noise / blocks**0.5
        ),
        slope_deviation=1.1 * slope_variance**0.5,  # medians are less efficient than means
        noise=noise,
        points=count,
        stepwise=_step_odds(medians, squares, min_noise**2, (1 - kept) / (1 + kept)),
    )


def _step_odds(
    medians: Array, squares_of_line: float, min_variance: float, independent: float
) -> float:
    """Return the odds of one step, at its best position, against a line (Schwarz 1978).

    `independent` is the effective share of independent values.
    """
    count = len(medians)
    centred = medians - medians.sum() / count
    before = np.cumsum(centred)[:-1]
    ahead = np.arange(1, count)
    explained = before**2 * (1 / ahead + 1 / (count - ahead))
    squares = float(centred @ centred) - float(explained.max())
    least = min_variance * count / 4
    ratio = (squares_of_line + least) / (max(squares, 0.0) + least)
    return float(ratio ** (independent * count / 2) / count)


def upper_median(values: Array) -> float:
    """Return the upper median. On short series np.median takes five times as long."""
    return float(np.partition(values, len(values) // 2)[len(values) // 2])


@cache
def _pairs(blocks: int) -> tuple[Integers, Integers]:
    first, second = np.triu_indices(blocks, 1)
    return first, second
