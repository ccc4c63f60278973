"""Distribution of the errors of peak prediction: empirical body, heavy tail.

Up to the 95th percentile the distribution is that of the errors themselves. Beyond it lies a
generalised Pareto distribution (Pickands 1975), fitted by probability-weighted moments (Hosking and
Wallis 1987).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
BODY = 0.95
# A dozen excesses do not determine a shape; it is shrunk towards the one typical of RSS noise.
PRIOR_SHAPE, PRIOR_EXCESSES = 0.15, 20
MIN_SHAPE, MAX_SHAPE = 0.0, 0.5
# With fewer errors than this, the width is shrunk towards the expected one.
PRIOR_ERRORS = 10
MIN_PROBABILITY = 1e-9
# Quantiles of the normal distribution, used while errors are too few for an empirical body.
_NORMAL_BODY = (-1.96, -1.44, -1.15, -0.84, -0.52, -0.25, 0.0, 0.25, 0.52, 0.84, 1.15, 1.44, 1.645)
_NORMAL_RANKS = (0.025, 0.075, 0.125, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.875, 0.925, 0.95)
_MEDIAN = _NORMAL_RANKS.index(0.5)
_NORMALS, _QUANTILES = np.array(_NORMAL_BODY), np.array(_NORMAL_RANKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorTail:
    """Distribution of prediction errors (observed minus predicted peak), in bytes.

    Attributes:
        errors: Errors at the quantiles `ranks`, both ascending; the last is the tail's threshold.
        ranks: Cumulative probability at each of `errors`.
        scale: Scale of the generalised Pareto distribution beyond the threshold, bytes.
        shape: Shape of that distribution; 0 is an exponential tail, 0.5 has infinite variance.
        width: Standard deviation of the body, bytes.
    """

    errors: tuple[float, ...]
    ranks: tuple[float, ...]
    scale: float
    shape: float
    width: float

    def exceedance(self, margin: float) -> float:
        """Return the probability that an error is larger than `margin` bytes."""
        if margin >= self.errors[-1]:
            beyond = (margin - self.errors[-1]) / self.scale
            survival = (1 - BODY) * float((1 + self.shape * beyond) ** (-1 / self.shape))
        else:
            survival = 1 - self._cumulative(margin)
        return min(max(survival, MIN_PROBABILITY), 1 - MIN_PROBABILITY)

    def exceedances(self, margins: Array) -> Array:
        """Return `exceedance` of each margin; vectorised."""
        beyond = np.maximum(margins - self.errors[-1], 0) / self.scale
        tail = (1 - BODY) * (1 + self.shape * beyond) ** (-1 / self.shape)
        body = 1 - np.interp(margins, self.errors, self.ranks)
        below = np.maximum(self.errors[0] - margins, 0) / self.scale
        body = np.where(below > 0, 1 - self.ranks[0] / (1 + below) ** 3, body)
        survival = np.where(margins >= self.errors[-1], tail, body)
        return np.clip(survival, MIN_PROBABILITY, 1 - MIN_PROBABILITY)

    def widened(self, noise: float) -> ErrorTail:
        """Return the distribution of the sum with independent noise of this deviation, in bytes."""
        factor = float(np.hypot(self.width, noise)) / self.width
        median = self.errors[_MEDIAN]
        return ErrorTail(
            errors=tuple(median + factor * (error - median) for error in self.errors),
            ranks=self.ranks,
            scale=self.scale * factor,
            shape=self.shape,
            width=self.width * factor,
        )

    def _cumulative(self, error: float) -> float:
        """Return the cumulative probability of an error below the threshold."""
        above = bisect_left(self.errors, error)
        if above == 0:
            return self.ranks[0] / (1 + (self.errors[0] - error) / self.scale) ** 3
        low, high = self.errors[above - 1], self.errors[above]
        part = (error - low) / (high - low) if high > low else 1.0
        return self.ranks[above - 1] + part * (self.ranks[above] - self.ranks[above - 1])


def fit_tail(errors: Sequence[float] | Array, *, expected: float, least: float) -> ErrorTail:
    """Fit the distribution of errors.

    Args:
        errors: Errors of prediction, in bytes.
        expected: Deviation assumed before any error is known, in bytes.
        least: Lower bound of the deviation, in bytes; readings are quantised.
    """
    known = np.sort(np.asarray(errors, dtype=float))
    count = len(known)
    median, deviation = _median_and_deviation(known)
    variance = (count * deviation**2 + PRIOR_ERRORS * expected**2) / (count + PRIOR_ERRORS)
    width = max(float(np.sqrt(variance if count < 3 * PRIOR_ERRORS else deviation**2)), least)
    body = median * min(1.0, count / PRIOR_ERRORS) + width * _NORMALS
    if count >= 3 * PRIOR_ERRORS:
        ranks = (np.arange(count) + 0.5) / count
        found, narrowest = np.interp(_QUANTILES, ranks, known), median + least * _NORMALS
        body = np.where(_NORMALS < 0, np.minimum(found, narrowest), np.maximum(found, narrowest))
    threshold = float(body[-1])
    scale, shape = _fit_excesses(known[known > threshold] - threshold, 0.4 * width)
    return ErrorTail(
        errors=tuple(np.maximum.accumulate(body).tolist()),
        ranks=_NORMAL_RANKS,
        scale=max(scale, 0.4 * least),
        shape=shape,
        width=width,
    )


def _median_and_deviation(known: Array) -> tuple[float, float]:
    """Return the median and a robust deviation: the wider of two, so that no tail is missed."""
    if len(known) == 0:
        return 0.0, 0.0
    low, lower, median, higher, high = np.quantile(known, (0.05, 0.25, 0.5, 0.75, 0.95)).tolist()
    return median, max((higher - lower) / 1.35, (high - low) / 3.29)


def _fit_excesses(excesses: Array, expected_scale: float) -> tuple[float, float]:
    """Fit scale and shape to the excesses over the threshold, shrunk towards the prior."""
    count = len(excesses)
    weight = count / (count + PRIOR_EXCESSES)
    if count < 5:
        mean = (float(excesses.sum()) + 3 * expected_scale / (1 - PRIOR_SHAPE)) / (count + 3)
        return mean * (1 - PRIOR_SHAPE), PRIOR_SHAPE
    first = float(excesses.mean())
    ranks = (np.arange(count) + 0.65) / count
    second = float((np.sort(excesses) * (1 - ranks)).mean())
    fitted = 2 - first / max(first - 2 * second, 1e-9 * first)
    shape = weight * fitted + (1 - weight) * PRIOR_SHAPE
    shape = min(max(shape, MIN_SHAPE + 0.01, 0.01), MAX_SHAPE)
    return first * (1 - shape), shape
