"""Probability that a peak of the next steps exceeds the memory limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .error_tail import ErrorTail
from .trend import Trend

Array = npt.NDArray[np.float64]
HORIZON_STEPS = 50
# The horizon is evaluated in this many parts, each at its midpoint.
_PARTS = 8
_AHEAD = (np.arange(_PARTS) + 0.5) * HORIZON_STEPS / _PARTS
# Gauss-Hermite quadrature of a normal distribution by five points.
_NODES = np.array((-2.857, -1.356, 0.0, 1.356, 2.857))
_NODE_WEIGHTS = np.array((0.01126, 0.22208, 0.53332, 0.22208, 0.01126))
# Prior odds against growth, and the typical growth within the horizon relative to the need.
NO_GROWTH_ODDS, TYPICAL_GROWTH_RATIO = 10.0, 0.02
MAX_RISK = 1 - 1e-6
# Observed frequency of events predicted as certain, on the tuning runs of
# tests/bench/memory/oom_risk.py: growth may stop, noise may change.
TRUST = 0.87
# Growth is likely to last as long again as it has (Laplace's rule of succession, with a prior).
LASTING_STEPS = 24.0
# Steps needed for full confidence in the largest peaks, and in growth.
STEPS_FOR_PEAKS, STEPS_FOR_GROWTH = 150.0, 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Growth of the need per step, in bytes, with its standard deviation.

    `weight` is the probability that it grows at all.
    """

    slope: float = 0.0
    deviation: float = 0.0
    weight: float = 0.0


def growing_weight(trend: Trend, need: float, per_reading: float) -> float:
    """Return the probability that a series grows.

    By Bayes' rule: a slope of exactly zero against one drawn from a normal distribution of typical
    growth.
    """
    if trend.slope_deviation <= 0 or trend.slope <= 0:
        return 0.0
    freedom = max(min(trend.points // 2, 16) - 2, 1)
    score = trend.slope / trend.slope_deviation
    # Student's t, as the deviation is itself an estimate.
    evidence = 0.5 * (freedom + 1) * np.log1p(score**2 / freedom)
    typical = TYPICAL_GROWTH_RATIO * need / HORIZON_STEPS
    penalty = 0.5 * np.log1p((typical / trend.slope_deviation) ** 2)
    odds = np.exp(min(evidence - penalty, 50.0)) / NO_GROWTH_ODDS
    steps = trend.points * per_reading
    lasts = steps / (steps + LASTING_STEPS)
    return float(lasts * odds / (1 + odds) / (1 + trend.stepwise))


def combine(trends: Sequence[Trend], need: float, per_reading: float) -> Growth:
    """Return the total growth of all parts of the need."""
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
        margins: [k] limit minus predicted peak of each kind of reading, bytes.
        shares: [k] probability of each kind.
        tail: Distribution of prediction errors.
        growth: Growth of the need.
        per_reading: Steps between readings.
        survived: Expected number of past readings above the limit, by the same model. None was, so
            the model is too pessimistic. Let an unknown factor on it be exponentially distributed
            around 1. Given none of `survived`, its expectation is 1 / (1 + survived).
        known: Number of steps that the model is based on.
    """
    factor = HORIZON_STEPS / per_reading / (1 + survived)
    steady = float(_exceedance(margins, shares, tail, np.zeros((1, 1)), factor)[0])
    steady *= min(known / STEPS_FOR_PEAKS, 1.0)
    if growth.weight == 0:
        return TRUST * steady
    slopes = np.maximum(growth.slope + growth.deviation * _NODES, 0)
    growing = _exceedance(margins, shares, tail, slopes[:, None] * _AHEAD, factor)
    mean = float(growing @ _NODE_WEIGHTS) * min(known / STEPS_FOR_GROWTH, 1.0)
    return TRUST * ((1 - growth.weight) * steady + growth.weight * mean)


def _exceedance(
    margins: Array, shares: Array, tail: ErrorTail, growths: Array, readings: float
) -> Array:
    """Return, for each row of growth over the horizon, the probability of exceeding the limit."""
    left = margins[None, None, :] - growths[:, :, None]
    each = np.minimum(tail.exceedances(left) @ shares, MAX_RISK)
    return np.asarray(1 - np.exp(readings * np.log1p(-each).mean(axis=1)))
