"""Growth that goes on and on: whether a series leaks, by how much, and since when.

Meant for what is in use between steps, where batches do not show: as a whole, or one category.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .trend import Trend, fit_line

Array = npt.NDArray[np.float64]

# What grows for fewer readings may be a warm-up, or a cache that fills.
LEAST_READINGS = 160
LEAST_SCORE = 5.0  # The slope must be so many times its deviation.
LEAST_GROWTH_BYTES, LEAST_GROWTH_RATIO = float(32 << 20), 0.002
# RSS of training that does not leak creeps by some percent for hundreds of steps, by fits and
# starts; 7 % was the most seen. What grows by less must be as straight as a line.
CREEP_RATIO, STRAIGHT_NOISES, LEAST_NOISES = 0.1, 20.0, 3.0
# Odds of one sudden step against a line, above which it is taken for a step.
MOST_STEPWISE = 0.1
# Each third of the time must bring so much of its share, and the last so much of what the first
# did: or the growth has ended, or slows down as a warm-up does.
LEAST_SHARE, LEAST_OF_FIRST = 0.4, 0.65
# What is in use at the least must grow, too, by so much of the same; else only what comes and goes
# has become more.
LEAST_OF_LOWEST = 0.5
LEAST_NOISE_BYTES = float(256 << 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """A series that grows steadily; `since_step` is where the straight part is known to begin."""

    bytes_per_step: float
    since_step: int


def find_leak(steps: Sequence[int], sizes: Sequence[float]) -> Leak | None:
    """Return the leak that a series ends with; None if it does not grow, or not for long enough.

    Args:
        steps: Rising numbers of steps.
        sizes: Bytes in use after each.
    """
    if len(sizes) < LEAST_READINGS:
        return None
    times, values = np.asarray(steps, dtype=float), np.asarray(sizes, dtype=float)
    length = len(values)
    while length >= LEAST_READINGS:
        trend = fit_line(times[-length:], values[-length:], LEAST_NOISE_BYTES)
        first = len(values) - length
        growth = trend.slope * (times[-1] - times[first])
        if _is_sure(trend, growth) and _goes_on(values, first, growth):
            return Leak(bytes_per_step=trend.slope, since_step=int(times[first]))
        length = length * 3 // 4
    return None


def _is_sure(trend: Trend, growth: float) -> bool:
    """Say whether this line is a line, and rises by more than may be by chance or as a warm-up."""
    least = max(LEAST_GROWTH_BYTES, LEAST_GROWTH_RATIO * trend.level, LEAST_NOISES * trend.noise)
    return (
        trend.slope > LEAST_SCORE * trend.slope_deviation
        and growth > least
        and (growth > CREEP_RATIO * trend.level or growth > STRAIGHT_NOISES * trend.noise)
        and trend.stepwise < MOST_STEPWISE
    )


def _goes_on(values: Array, first: int, growth: float) -> bool:
    """Say whether all of the stretch grew, to the last, and it was never as high before.

    What came down once will do so again.
    """
    stretch = values[first:]
    sixths = np.array_split(stretch, 6)
    ends = [float(np.median(part)) for part in sixths]
    thirds = np.diff(ends)[[0, 2, 4]]  # from one sixth to the next
    lowest = float(sixths[-1].min() - sixths[0].min())
    highest = float(values[:first].max()) if first else -np.inf
    return bool(
        thirds.min() > LEAST_SHARE * growth / 6
        and thirds[-1] > LEAST_OF_FIRST * thirds[0]
        and lowest > LEAST_OF_LOWEST * growth * 5 / 6
        and highest < ends[-1]
    )
