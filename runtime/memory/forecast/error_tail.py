"""How far peaks land above their prediction: the errors seen so far, with a heavy tail beyond.

Up to the 95th percentile it is the errors themselves; beyond it a generalised Pareto distribution
(Pickands 1975), fitted by probability-weighted moments (Hosking and Wallis 1987).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
BODY = 0.95
# A dozen excesses say little about a shape; it is drawn to that of most noise seen on RSS.
PRIOR_SHAPE, PRIOR_EXCESSES = 0.15, 20
LEAST_SHAPE, MOST_SHAPE = 0.0, 0.5
# Before so many errors are known, the width is drawn to the one expected beforehand.
PRIOR_ERRORS = 10
LEAST_PROBABILITY = 1e-9
# Body and tail of a normal distribution, for as long as errors are too few to have a shape.
_NORMAL_BODY = (-1.96, -1.44, -1.15, -0.84, -0.52, -0.25, 0.0, 0.25, 0.52, 0.84, 1.15, 1.44, 1.645)
_NORMAL_RANKS = (0.025, 0.075, 0.125, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.875, 0.925, 0.95)
_MIDDLE = _NORMAL_RANKS.index(0.5)
_NORMALS, _QUANTILES = np.array(_NORMAL_BODY), np.array(_NORMAL_RANKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorTail:
    """The distribution of errors of prediction (what came minus what was predicted), in bytes.

    Attributes:
        errors: Errors at the quantiles `ranks`, both rising; the last is the tail's threshold.
        ranks: The share of errors up to each of `errors`.
        scale: Scale of the generalised Pareto distribution beyond the threshold, bytes.
        shape: Its shape; 0 is an exponential tail, 0.5 one of infinite variance.
        width: Standard deviation of the body, bytes.
    """

    errors: tuple[float, ...]
    ranks: tuple[float, ...]
    scale: float
    shape: float
    width: float

    def passed(self, room: float) -> float:
        """Return the probability that an error is larger than `room` bytes."""
        if room >= self.errors[-1]:
            beyond = (room - self.errors[-1]) / self.scale
            survival = (1 - BODY) * float((1 + self.shape * beyond) ** (-1 / self.shape))
        else:
            survival = 1 - self._share(room)
        return min(max(survival, LEAST_PROBABILITY), 1 - LEAST_PROBABILITY)

    def all_passed(self, rooms: Array) -> Array:
        """Return what `passed` does, for many."""
        beyond = np.maximum(rooms - self.errors[-1], 0) / self.scale
        tail = (1 - BODY) * (1 + self.shape * beyond) ** (-1 / self.shape)
        body = 1 - np.interp(rooms, self.errors, self.ranks)
        below = np.maximum(self.errors[0] - rooms, 0) / self.scale
        body = np.where(below > 0, 1 - self.ranks[0] / (1 + below) ** 3, body)
        survival = np.where(rooms >= self.errors[-1], tail, body)
        return np.clip(survival, LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)

    def widened(self, noise: float) -> ErrorTail:
        """Return the distribution of the sum with other noise of this deviation, in bytes."""
        factor = float(np.hypot(self.width, noise)) / self.width
        middle = self.errors[_MIDDLE]
        return ErrorTail(
            errors=tuple(middle + factor * (error - middle) for error in self.errors),
            ranks=self.ranks,
            scale=self.scale * factor,
            shape=self.shape,
            width=self.width * factor,
        )

    def _share(self, error: float) -> float:
        """Return the share of errors up to this one, which is below the threshold."""
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
        expected: The deviation expected before any error is known, in bytes.
        least: A deviation that is not gone below, as readings come in blocks, in bytes.
    """
    known = np.sort(np.asarray(errors, dtype=float))
    count = len(known)
    middle, deviation = _middle_and_deviation(known)
    variance = (count * deviation**2 + PRIOR_ERRORS * expected**2) / (count + PRIOR_ERRORS)
    width = max(float(np.sqrt(variance if count < 3 * PRIOR_ERRORS else deviation**2)), least)
    body = middle * min(1.0, count / PRIOR_ERRORS) + width * _NORMALS
    if count >= 3 * PRIOR_ERRORS:
        ranks = (np.arange(count) + 0.5) / count
        found, narrowest = np.interp(_QUANTILES, ranks, known), middle + least * _NORMALS
        body = np.where(_NORMALS < 0, np.minimum(found, narrowest), np.maximum(found, narrowest))
    threshold = float(body[-1])
    scale, shape = _excesses(known[known > threshold] - threshold, 0.4 * width)
    return ErrorTail(
        errors=tuple(np.maximum.accumulate(body).tolist()),
        ranks=_NORMAL_RANKS,
        scale=max(scale, 0.4 * least),
        shape=shape,
        width=width,
    )


def _middle_and_deviation(known: Array) -> tuple[float, float]:
    """Return median and robust deviation; the wider of two, as a tail must not hide."""
    if len(known) == 0:
        return 0.0, 0.0
    low, lower, middle, higher, high = np.quantile(known, (0.05, 0.25, 0.5, 0.75, 0.95)).tolist()
    return middle, max((higher - lower) / 1.35, (high - low) / 3.29)


def _excesses(excesses: Array, expected_scale: float) -> tuple[float, float]:
    """Fit scale and shape to what lies beyond the threshold, drawn to what is expected."""
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
    shape = min(max(shape, LEAST_SHAPE + 0.01, 0.01), MOST_SHAPE)
    return first * (1 - shape), shape
