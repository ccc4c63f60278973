"""Where a series is heading: a robust slope, how sure it is, and over how many readings it holds.

A straight line is fitted by Theil and Sen's median of slopes, over block medians, so that single
outliers do not pass for a trend. Of several stretches that end now the longest is taken that agrees
with all shorter ones (Lepski's rule): a leak that began a while ago, a jump, or a plateau ends the
stretch. Noise that lasts wanders, and looks like a trend on a short stretch: how long it lasts is
read from the correlation of differences, as of a first-order autoregression.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int_]
LEAST_POINTS = 12
STRETCHES = (16, 32, 64, 128, 256, 512)
BLOCKS = 16
# Of two stretches, slopes or levels that differ by more than so many deviations disagree, and by
# more than so many divided by the readings of the shorter, whose deviation is itself an estimate.
DISAGREEMENT, UNSURE = 3.0, 24.0
# Differences are judged each clipped at so many deviations: jumps are rare.
CLIPPED_AT = 5.0
MOST_MEMORY = 0.98
# A stretch of so many readings knows its own noise; one that is longer and noisier is not a line.
SURE_POINTS, LIKE_NOISE = 48, 1.4
# A line is beyond doubt with a slope of so many deviations, and such odds of a step instead.
SURE_SCORE, SURE_STEPWISE = 6.0, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A line through the last readings of a series, in units of the series.

    Attributes:
        level: Its value at the last reading.
        slope: Its growth per step.
        level_deviation, slope_deviation: Standard deviations of the two.
        noise: Standard deviation of single readings around the line.
        points: How many readings it rests on.
        stepwise: How much better one sudden step explains it than the line does, as odds.
    """

    level: float
    slope: float = 0.0
    level_deviation: float = 0.0
    slope_deviation: float = 0.0
    noise: float = 0.0
    points: int = 0
    stepwise: float = 0.0


def fit_trend(steps: Array, values: Array, least_noise: float) -> Trend:
    """Fit the end of a series.

    Args:
        steps: Rising numbers of steps.
        values: One value for each.
        least_noise: Noise of single readings that is not gone below.
    """
    count = len(values)
    if count < LEAST_POINTS:
        return Trend(level=_median(values[-5:]), noise=least_noise, points=count)
    lengths = [*(one for one in STRETCHES if 1.3 * one < count), count]
    memory = _memory_of_differences(values, least_noise)
    chosen = _longest(steps, values, lengths, least_noise, memory)
    if chosen.points >= SURE_POINTS or count < 2 * SURE_POINTS:
        return chosen
    # What grows by chunks stands still for as long as a short stretch lasts.
    sure = [length for length in lengths if length >= SURE_POINTS]
    longer = _longest(steps, values, sure, least_noise, memory)
    return longer if _holds(longer, values) else chosen


def fit_line(steps: Array, values: Array, least_noise: float) -> Trend:
    """Fit one line to all of a series of at least `LEAST_POINTS`."""
    return _line(steps, values, least_noise, _memory_of_differences(values, least_noise))


def _longest(
    steps: Array, values: Array, lengths: Sequence[int], least_noise: float, memory: float
) -> Trend:
    """Return the longest stretch that agrees with all shorter ones."""
    chosen: list[Trend] = []
    for length in lengths:
        trend = _line(steps[-length:], values[-length:], least_noise, memory)
        if not all(_agree(trend, shorter) for shorter in chosen):
            break
        chosen.append(trend)
    return chosen[-1]


def _holds(trend: Trend, values: Array) -> bool:
    """Say whether a line is beyond doubt, and the last readings still lie on it."""
    off = abs(_median(values[-9:]) - trend.level)
    return (
        trend.slope > SURE_SCORE * trend.slope_deviation
        and trend.stepwise < SURE_STEPWISE
        and off < 3 * trend.noise
    )


def _agree(longer: Trend, shorter: Trend) -> bool:
    slopes = (longer.slope_deviation**2 + shorter.slope_deviation**2) ** 0.5
    levels = (longer.level_deviation**2 + shorter.level_deviation**2) ** 0.5
    far = DISAGREEMENT + UNSURE / shorter.points
    return (
        abs(longer.slope - shorter.slope) <= far * slopes
        and abs(longer.level - shorter.level) <= far * levels
        and (shorter.points < SURE_POINTS or longer.noise <= LIKE_NOISE * shorter.noise)
    )


def _memory_of_differences(values: Array, least: float) -> float:
    """Return how much of its noise a series keeps per reading; a steady slope does not matter."""
    differences = np.diff(values)
    differences -= _median(differences)
    usual = max(1.4826 * _median(np.abs(differences)), least)
    clipped = np.clip(differences, -CLIPPED_AT * usual, CLIPPED_AT * usual)
    squares = float(clipped @ clipped)
    if squares < len(clipped) * least**2:  # all below what readings can tell
        return 0.0
    correlation = float(clipped[1:] @ clipped[:-1]) / squares
    return min(max(1 + 2 * correlation, 0.0), MOST_MEMORY)


def _memory_of(around: Array, memory: float) -> float:
    """Return the same from what is left around a line, which tells more where it is long.

    Fitting a line takes away (2 + 4 memory) / n of it (Marriott and Pope 1954).
    """
    count = len(around)
    if count < SURE_POINTS:
        return memory
    found = float(around[1:] @ around[:-1]) / max(float(around @ around), 1e-300)
    return min(max((found + 2 / count) / (1 - 4 / count), 0.0), MOST_MEMORY)


def _line(steps: Array, values: Array, least_noise: float, memory: float) -> Trend:
    """Fit one line to all of these."""
    count = len(values)
    blocks = min(BLOCKS, count // 2)
    size = count // blocks
    parts = values[-blocks * size :].reshape(blocks, size)
    middles = np.partition(parts, size // 2, axis=1)[:, size // 2]
    centres = steps[-blocks * size :].reshape(blocks, size).sum(axis=1) / size
    first, second = _pairs(blocks)
    slope = _median((middles[second] - middles[first]) / (centres[second] - centres[first]))
    away = centres - steps[-1]
    level = _median(middles - slope * away)
    around = values - level - slope * (steps - steps[-1])
    noise = max(1.4826 * _median(np.abs(around)), least_noise)
    around = np.clip(around, -CLIPPED_AT * noise, CLIPPED_AT * noise)
    memory = _memory_of(around, memory)
    width = max((float(around @ around) / count) ** 0.5, noise)
    lasting = (1 + memory) / (1 - memory)
    of_blocks = middles - level - slope * away
    squares = float(of_blocks @ of_blocks)
    kept = memory**size
    block_noise = (squares / (blocks - 2) * (1 + kept) / (1 - kept)) ** 0.5
    away -= away.sum() / blocks
    per_reading = float(steps[-1] - steps[0]) / (count - 1)
    slope_variance = max(
        block_noise**2 / float(away @ away),
        width**2 * min(12 * lasting / count**3, 2.4 * (1 - memory) / count) / per_reading**2,
    )
    return Trend(
        level=level,
        slope=slope,
        level_deviation=max(
            width * min(4 * lasting / count, 1.0) ** 0.5, 2 * block_noise / blocks**0.5
        ),
        slope_deviation=1.1 * slope_variance**0.5,  # the price of medians
        noise=noise,
        points=count,
        stepwise=_step_odds(middles, squares, least_noise**2, (1 - kept) / (1 + kept)),
    )


def _step_odds(middles: Array, squares_of_line: float, least_variance: float, told: float) -> float:
    """Return the odds of one step at the best place against a line, as by Schwarz (1978).

    `told` is the share of these that tell something new.
    """
    count = len(middles)
    centred = middles - middles.sum() / count
    before = np.cumsum(centred)[:-1]
    ahead = np.arange(1, count)
    explained = before**2 * (1 / ahead + 1 / (count - ahead))
    squares = float(centred @ centred) - float(explained.max())
    least = least_variance * count / 4
    ratio = (squares_of_line + least) / (max(squares, 0.0) + least)
    return float(ratio ** (told * count / 2) / count)


def _median(values: Array) -> float:
    """Return the upper median; np.median takes five times as long on short series."""
    return float(np.partition(values, len(values) // 2)[len(values) // 2])


@cache
def _pairs(blocks: int) -> tuple[Integers, Integers]:
    first, second = np.triu_indices(blocks, 1)
    return first, second
