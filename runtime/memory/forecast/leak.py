"""Detects leaks: steady growth of a series of memory readings.

Made for memory in use between steps, which batches do not change: the total, or one category.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .trend import Trend, fit_line

Array = npt.NDArray[np.float64]

# Growth over fewer readings may be a warm-up, or a cache that fills.
MIN_READINGS = 160
MIN_SCORE = 5.0  # Minimum slope, in standard deviations.
MIN_GROWTH_BYTES, MIN_GROWTH_RATIO = float(32 << 20), 0.002
# RSS of training without a leak creeps by some percent for hundreds of steps, in bursts; the most
# observed was 7 %. Growth below this ratio must be a straight line.
CREEP_RATIO, STRAIGHT_NOISES, MIN_NOISES = 0.1, 20.0, 3.0
# Maximum odds of one sudden step against a line.
MAX_STEPWISE = 0.1
# Minimum growth of each third relative to an even share, and of the last relative to the first.
# Otherwise the growth has ended, or slows down as a warm-up does.
MIN_SHARE, MIN_OF_FIRST = 0.4, 0.65
# Minimum growth of the lowest readings relative to the total growth. Otherwise only temporary
# memory has grown.
MIN_OF_LOWEST = 0.5
MIN_NOISE_BYTES = float(256 << 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """Steady growth of a series; `since_step` is the first step of the straight part."""

    bytes_per_step: float
    since_step: int


def find_leak(steps: Sequence[int], sizes: Sequence[float]) -> Leak | None:
    """Return the leak at the end of a series; None without growth, or if it is too recent.

    Args:
        steps: Step numbers, ascending.
        sizes: Bytes in use after each step.
    """
    if len(sizes) < MIN_READINGS:
        return None
    times, values = np.asarray(steps, dtype=float), np.asarray(sizes, dtype=float)
    length = len(values)
    while length >= MIN_READINGS:
        trend = fit_line(times[-length:], values[-length:], MIN_NOISE_BYTES)
        first = len(values) - length
        growth = trend.slope * (times[-1] - times[first])
        if _is_linear_growth(trend, growth) and _is_sustained(values, first, growth):
            return Leak(bytes_per_step=trend.slope, since_step=int(times[first]))
        length = length * 3 // 4
    return None


def _is_linear_growth(trend: Trend, growth: float) -> bool:
    """Return whether the growth is linear, and larger than noise or a warm-up explains."""
    least = max(MIN_GROWTH_BYTES, MIN_GROWTH_RATIO * trend.level, MIN_NOISES * trend.noise)
    return (
        trend.slope > MIN_SCORE * trend.slope_deviation
        and growth > least
        and (growth > CREEP_RATIO * trend.level or growth > STRAIGHT_NOISES * trend.noise)
        and trend.stepwise < MAX_STEPWISE
    )


def _is_sustained(values: Array, first: int, growth: float) -> bool:
    """Return whether all parts of the stretch grew, and no earlier value was as high.

    Memory that was freed once is expected to be freed again.
    """
    stretch = values[first:]
    sixths = np.array_split(stretch, 6)
    ends = [float(np.median(part)) for part in sixths]
    thirds = np.diff(ends)[[0, 2, 4]]  # from one sixth to the next
    lowest = float(sixths[-1].min() - sixths[0].min())
    highest = float(values[:first].max()) if first else -np.inf
    return bool(
        thirds.min() > MIN_SHARE * growth / 6
        and thirds[-1] > MIN_OF_FIRST * thirds[0]
        and lowest > MIN_OF_LOWEST * growth * 5 / 6
        and highest < ends[-1]
    )
