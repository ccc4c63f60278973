"""Computes confidence bounds of the mean of a few noisy differences.

Disturbed blocks are outliers, so the mean is winsorized, with the standard error of Tukey and
McLaughlin. In 20,000 simulated trials without effect (`tests/bench/tuner/simulated_trials.py`),
Student's quantiles hold to 7 % down to a level of 0.001. The plain standard error of the winsorized
values would be two fifths too small. Fewer than 8 values are not winsorized, because too few values
would be left. Outliers then widen the plain standard error, which is conservative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import atan, cos, inf, pi, sin, sqrt
from statistics import fmean, stdev

WINSORIZED_FROM = 8  # fewer values than this are not winsorized
WINSORIZED_ONE_OF = 8  # at each end, one of this many values is winsorized
# Minimum standard error. Differences may all be equal by chance or because of a coarse clock.
MIN_ERROR = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its standard error and degrees of freedom."""

    mean: float
    error: float
    freedom: int

    def lower(self, level: float) -> float:
        """Return the bound that the true mean is below with a probability of `level`."""
        return self.mean - student_quantile(1 - level, self.freedom) * self.error

    def upper(self, level: float) -> float:
        """Return the bound that the true mean is above with a probability of `level`."""
        return self.mean + student_quantile(1 - level, self.freedom) * self.error


def winsorized_mean(differences: Sequence[float]) -> Estimate:
    """Return the winsorized mean of at least two differences."""
    num = len(differences)
    cut = num // WINSORIZED_ONE_OF if num >= WINSORIZED_FROM else 0
    ordered = sorted(differences)
    least, most = ordered[cut], ordered[-1 - cut]
    values = [min(max(value, least), most) for value in ordered]
    kept = num - 2 * cut
    error = stdev(values) / sqrt(num) * (num - 1) / (kept - 1)
    return Estimate(mean=fmean(values), error=error + MIN_ERROR, freedom=kept - 1)


@lru_cache(maxsize=256)
def student_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t for a probability of 0.5 or more."""
    low, high = 0.0, 1.0
    while student_probability(high, freedom) < probability:
        low, high = high, high * 2
        if high == inf:
            return inf
    for _ in range(60):
        middle = (low + high) / 2
        if student_probability(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return high


def student_probability(value: float, freedom: int) -> float:
    """Return the distribution function of Student's t; Abramowitz and Stegun, 26.7.3 and 4."""
    angle = atan(value / sqrt(freedom))
    odd = freedom % 2
    term = cos(angle) if odd else 1.0
    total = 0.0
    for index in range(freedom // 2):
        total += term
        term *= cos(angle) ** 2 * (2 * index + 1 + odd) / (2 * index + 2 + odd)
    within = 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total
    return 0.5 + within / 2
