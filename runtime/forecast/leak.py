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
LEAST_READINGS = 64
# The slope must be so many times its deviation, and the growth so many times the noise.
LEAST_SCORE, LEAST_NOISES = 5.0, 3.0
LEAST_GROWTH_BYTES, LEAST_GROWTH_RATIO = float(8 << 20), 0.002
# Odds of one sudden step against a line, above which it is taken for a step.
MOST_STEPWISE = 0.1
# Each third of the time must bring so much of its share, or the growth has ended.
LEAST_SHARE = 0.4
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
    """Say whether this line is a line, and rises by more than may be by chance."""
    least = max(LEAST_GROWTH_BYTES, LEAST_GROWTH_RATIO * trend.level, LEAST_NOISES * trend.noise)
    return (
        trend.slope > LEAST_SCORE * trend.slope_deviation
        and growth > least
        and trend.stepwise < MOST_STEPWISE
    )


def _goes_on(values: Array, first: int, growth: float) -> bool:
    """Say whether each third of the stretch grew, and it was never as high before.

    What came down once will do so again.
    """
    stretch = values[first:]
    ends = [float(np.median(part)) for part in np.array_split(stretch, 6)]
    thirds = np.diff(ends)[[0, 2, 4]]  # from one sixth to the next
    highest = float(values[:first].max()) if first else -np.inf
    return bool((thirds > LEAST_SHARE * growth / 6).all()) and highest < ends[-1]
