"""Estimates the probability that a peak of the next steps exceeds the memory limit.

`fit_tail` describes the errors of peak prediction, and `combine_trends` describes the growth of
memory. `risk_ahead` computes the probability from both.

Up to the 95th percentile, the empirical distribution of the errors is used. Above this percentile,
the distribution is a generalized Pareto distribution (Pickands 1975), fitted by
probability-weighted moments (Hosking and Wallis 1987).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...common.gil_pauses import let_training_run
from .trend import Trend

Array = npt.NDArray[np.float64]

# Cumulative probability at which the Pareto tail begins.
TAIL_START_PROBABILITY = 0.95
# A dozen errors in the tail do not determine its shape. The shape is therefore shrunk towards the
# typical shape of RSS noise, which has the weight of this many errors.
PRIOR_SHAPE = 0.15
PRIOR_EXCESSES = 20
# Bounds of the shape. A tail of shape 0 is exponential, and a tail of shape 0.5 has infinite
# variance.
MIN_SHAPE = 0.0
MAX_SHAPE = 0.5
# If there are fewer errors than this, the width is shrunk towards the expected width.
PRIOR_ERRORS = 10
MIN_PROBABILITY = 1e-9
# Quantiles of the normal distribution. They are used if there are too few errors for an empirical
# distribution.
_NORMAL_BODY = (-1.96, -1.44, -1.15, -0.84, -0.52, -0.25, 0.0, 0.25, 0.52, 0.84, 1.15, 1.44, 1.645)
_NORMAL_RANKS = (0.025, 0.075, 0.125, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.875, 0.925, 0.95)
_MEDIAN = _NORMAL_RANKS.index(0.5)
_NORMALS = np.array(_NORMAL_BODY)
_QUANTILES = np.array(_NORMAL_RANKS)

# The published risk covers this many steps ahead.
HORIZON_STEPS = 50
# The horizon is evaluated in this many parts, each at its midpoint.
_PARTS = 8
_AHEAD = (np.arange(_PARTS) + 0.5) * HORIZON_STEPS / _PARTS
# Gauss-Hermite quadrature of a normal distribution with five points.
_NODES = np.array((-2.857, -1.356, 0.0, 1.356, 2.857))
_NODE_WEIGHTS = np.array((0.01126, 0.22208, 0.53332, 0.22208, 0.01126))
# Prior odds that memory does not grow.
NO_GROWTH_ODDS = 10.0
# Typical growth of memory within the horizon, relative to the need.
TYPICAL_GROWTH_RATIO = 0.02
# Upper bound of the probability that one reading exceeds the limit.
MAX_RISK = 1 - 1e-6
# Events that were predicted as certain occurred with this frequency in the tuning runs of
# tests/bench/memory/oom_risk.py. The frequency is below 1 because growth may stop and noise may
# change.
MAX_FORECAST_CONFIDENCE = 0.87
# Growth is likely to last for as many steps as it has lasted so far (Laplace's rule of succession,
# with a prior of this many steps).
LASTING_STEPS = 24.0
# Number of steps needed for full confidence in the largest peaks, and in growth.
STEPS_FOR_PEAKS = 150.0
STEPS_FOR_GROWTH = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorTail:
    """The distribution of prediction errors (observed minus predicted peak), in bytes.

    Attributes:
        errors: Errors at the quantiles `ranks`, ascending. The last error is the threshold at which
            the tail begins.
        ranks: Cumulative probability at each of `errors`.
        scale: Scale, in bytes, of the generalized Pareto distribution above the threshold.
        shape: Shape of the generalized Pareto distribution. 0 is an exponential tail, and 0.5 has
            infinite variance.
        width: Standard deviation, in bytes, of the distribution below the threshold.
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
            survival = (1 - TAIL_START_PROBABILITY) * float(
                (1 + self.shape * beyond) ** (-1 / self.shape)
            )
        else:
            survival = 1 - self._cumulative(margin)
        return min(max(survival, MIN_PROBABILITY), 1 - MIN_PROBABILITY)

    def exceedances(self, margins: Array) -> Array:
        """Return `exceedance` of each margin, computed with array operations."""
        beyond = np.maximum(margins - self.errors[-1], 0) / self.scale
        tail = (1 - TAIL_START_PROBABILITY) * (1 + self.shape * beyond) ** (-1 / self.shape)
        body = 1 - np.interp(margins, self.errors, self.ranks)
        below = np.maximum(self.errors[0] - margins, 0) / self.scale
        body = np.where(below > 0, 1 - self.ranks[0] / (1 + below) ** 3, body)
        survival = np.where(margins >= self.errors[-1], tail, body)
        return np.clip(survival, MIN_PROBABILITY, 1 - MIN_PROBABILITY)

    def widened(self, noise: float) -> ErrorTail:
        """Return the distribution of error plus independent noise of this deviation in bytes."""
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


def fit_tail(errors: Sequence[float] | Array, *, expected: float, min_width: float) -> ErrorTail:
    """Fit a distribution to errors of prediction.

    Args:
        errors: Errors of prediction, in bytes.
        expected: Deviation in bytes that is assumed before any error is known.
        min_width: Lower bound of the deviation in bytes, because readings are quantized.
    """
    known = np.sort(np.asarray(errors, dtype=float))
    count = len(known)
    median, deviation = _median_and_deviation(known)
    variance = (count * deviation**2 + PRIOR_ERRORS * expected**2) / (count + PRIOR_ERRORS)
    width = max(float(np.sqrt(variance if count < 3 * PRIOR_ERRORS else deviation**2)), min_width)
    body = median * min(1.0, count / PRIOR_ERRORS) + width * _NORMALS
    if count >= 3 * PRIOR_ERRORS:
        ranks = (np.arange(count) + 0.5) / count
        quantiles, narrowest = np.interp(_QUANTILES, ranks, known), median + min_width * _NORMALS
        body = np.where(
            _NORMALS < 0, np.minimum(quantiles, narrowest), np.maximum(quantiles, narrowest)
        )
    threshold = float(body[-1])
    scale, shape = _fit_excesses(known[known > threshold] - threshold, 0.4 * width)
    return ErrorTail(
        errors=tuple(np.maximum.accumulate(body).tolist()),
        ranks=_NORMAL_RANKS,
        scale=max(scale, 0.4 * min_width),
        shape=shape,
        width=width,
    )


def _median_and_deviation(known: Array) -> tuple[float, float]:
    """Return the median and the larger of two robust deviations, so that no tail is missed."""
    if len(known) == 0:
        return 0.0, 0.0
    low, lower, median, higher, high = np.quantile(known, (0.05, 0.25, 0.5, 0.75, 0.95)).tolist()
    return median, max((higher - lower) / 1.35, (high - low) / 3.29)


def _fit_excesses(excesses: Array, expected_scale: float) -> tuple[float, float]:
    """Fit scale and shape to the excesses over the threshold, and shrink them to the prior."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The growth of the needed memory per step, in bytes, with its standard deviation.

    `weight` is the probability that the needed memory grows at all.
    """

    slope: float = 0.0
    deviation: float = 0.0
    weight: float = 0.0


def growing_weight(trend: Trend, need: float, per_reading: float) -> float:
    """Return the probability that a series grows.

    Bayes' rule compares two hypotheses: a slope of exactly zero, and a slope drawn from a normal
    distribution of typical growth.
    """
    if trend.slope_deviation <= 0 or trend.slope <= 0:
        return 0.0
    freedom = max(min(trend.points // 2, 16) - 2, 1)
    score = trend.slope / trend.slope_deviation
    # Student's t is used because the deviation is itself an estimate.
    evidence = 0.5 * (freedom + 1) * np.log1p(score**2 / freedom)
    typical = TYPICAL_GROWTH_RATIO * need / HORIZON_STEPS
    penalty = 0.5 * np.log1p((typical / trend.slope_deviation) ** 2)
    odds = np.exp(min(evidence - penalty, 50.0)) / NO_GROWTH_ODDS
    steps = trend.points * per_reading
    lasts = steps / (steps + LASTING_STEPS)
    return float(lasts * odds / (1 + odds) / (1 + trend.stepwise))


def combine_trends(trends: Sequence[Trend], need: float, per_reading: float) -> Growth:
    """Return the total growth of the needed memory, given the trends of its parts."""
    weights = [growing_weight(trend, need, per_reading) for trend in trends]
    weight = 1 - float(np.prod([1 - each for each in weights]))
    if weight < 1e-3:
        return Growth()
    pairs = list(zip(weights, trends, strict=True))
    slope = sum(each * trend.slope for each, trend in pairs) / weight
    variance = sum(each * trend.slope_deviation**2 for each, trend in pairs) / weight
    return Growth(slope=slope, deviation=float(np.sqrt(variance)), weight=weight)


def risk_ahead(
    margins: Array,
    shares: Array,
    tail: ErrorTail,
    growth: Growth,
    *,
    per_reading: float,
    survived: float,
    known: float,
) -> float:
    """Return the probability that a peak within the horizon exceeds the limit.

    Args:
        margins: [k] limit minus predicted peak, in bytes, of each kind of reading.
        shares: [k] probability of each kind.
        tail: Distribution of prediction errors.
        growth: Growth of the need.
        per_reading: Steps between readings.
        survived: Number of past readings that the same model expects above the limit. In fact no
            reading was above it, so the model is too pessimistic. The true number is assumed to be
            `survived` times an unknown factor, which is exponentially distributed with mean 1.
            Given that no reading was above the limit, the expected factor is 1 / (1 + survived).
        known: Number of steps that the model is based on.
    """
    factor = HORIZON_STEPS / per_reading / (1 + survived)
    steady = float(_exceedance(margins, shares, tail, np.zeros((1, 1)), factor)[0])
    steady *= min(known / STEPS_FOR_PEAKS, 1.0)
    let_training_run()
    if growth.weight == 0:
        return MAX_FORECAST_CONFIDENCE * steady
    slopes = np.maximum(growth.slope + growth.deviation * _NODES, 0)
    growing = _exceedance(margins, shares, tail, slopes[:, None] * _AHEAD, factor)
    mean = float(growing @ _NODE_WEIGHTS) * min(known / STEPS_FOR_GROWTH, 1.0)
    return MAX_FORECAST_CONFIDENCE * ((1 - growth.weight) * steady + growth.weight * mean)


def _exceedance(
    margins: Array, shares: Array, tail: ErrorTail, growths: Array, readings: float
) -> Array:
    """Return, for each row of growth over the horizon, the probability of exceeding the limit."""
    left = margins[None, None, :] - growths[:, :, None]
    each = np.minimum(tail.exceedances(left) @ shares, MAX_RISK)
    return np.asarray(1 - np.exp(readings * np.log1p(-each).mean(axis=1)))
