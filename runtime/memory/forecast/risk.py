"""How likely it is that a peak of the next steps passes the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .error_tail import ErrorTail
from .trend import Trend

Array = npt.NDArray[np.float64]
HORIZON_STEPS = 50
# The horizon is looked at in so many parts, each at its middle.
_PARTS = 8
_AHEAD = (np.arange(_PARTS) + 0.5) * HORIZON_STEPS / _PARTS
# Five points that stand for a normal distribution (Gauss-Hermite quadrature).
_NODES = np.array((-2.857, -1.356, 0.0, 1.356, 2.857))
_NODE_WEIGHTS = np.array((0.01126, 0.22208, 0.53332, 0.22208, 0.01126))
# Most series do not grow: how much more likely that is beforehand, and by how much others grow in
# the horizon, relative to the need.
STILL_ODDS, USUAL_GROWTH_RATIO = 10.0, 0.02
MOST_RISK = 1 - 1e-6
# How often what looks certain comes, on those generated runs of tests/bench/oom_risk.py that are
# for tuning: growth may stop, noise may be another than it was.
TRUST = 0.87
# What has grown for so many steps may stop as soon (Laplace's rule of succession, with a prior).
LASTING_STEPS = 24.0
# So many steps must be known for what they say of the next 50 to count in full: few do not tell how
# large peaks get, and fewer still do not tell of growth.
KNOWING_PEAKS, KNOWING_GROWTH = 150.0, 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """By how much need grows per step, in bytes, and how sure that is.

    `weight` is the probability that it grows at all.
    """

    slope: float = 0.0
    deviation: float = 0.0
    weight: float = 0.0


def growing_weight(trend: Trend, need: float, per_reading: float) -> float:
    """Return the probability that a series grows at all, rather than stands still.

    By Bayes: a slope of exactly zero against one from a normal distribution of usual growths.
    """
    if trend.slope_deviation <= 0 or trend.slope <= 0:
        return 0.0
    freedom = max(min(trend.points // 2, 16) - 2, 1)
    score = trend.slope / trend.slope_deviation
    # Student's t, as the deviation is itself an estimate.
    evidence = 0.5 * (freedom + 1) * np.log1p(score**2 / freedom)
    usual = USUAL_GROWTH_RATIO * need / HORIZON_STEPS
    penalty = 0.5 * np.log1p((usual / trend.slope_deviation) ** 2)
    odds = np.exp(min(evidence - penalty, 50.0)) / STILL_ODDS
    steps = trend.points * per_reading
    lasts = steps / (steps + LASTING_STEPS)
    return float(lasts * odds / (1 + odds) / (1 + trend.stepwise))


def combine(trends: Sequence[Trend], need: float, per_reading: float) -> Growth:
    """Add up the growth of all parts of what is needed."""
    weights = [growing_weight(trend, need, per_reading) for trend in trends]
    weight = 1 - float(np.prod([1 - one for one in weights]))
    if weight < 1e-3:
        return Growth()
    pairs = list(zip(weights, trends, strict=True))
    slope = sum(one * trend.slope for one, trend in pairs) / weight
    variance = sum(one * trend.slope_deviation**2 for one, trend in pairs) / weight
    return Growth(slope=slope, deviation=float(np.sqrt(variance)), weight=weight)


def risk_ahead(
    rooms: Array,
    shares: Array,
    tail: ErrorTail,
    growth: Growth,
    *,
    per_reading: float,
    survived: float,
    known: float,
) -> float:
    """Return the probability that a peak within the horizon passes the limit.

    Args:
        rooms: The limit minus what is predicted for each kind of reading, bytes.
        shares: How likely each of these is.
        tail: Errors of prediction.
        growth: Of what is needed.
        per_reading: Steps from reading to reading.
        survived: How many of the last readings should have passed the limit, by the same account.
            None did: the account is too dark. With a factor on it that is unknown beforehand
            (exponentially distributed around 1), none of `survived` says it is 1 / (1 + survived).
        known: How many steps all this is known from.
    """
    factor = HORIZON_STEPS / per_reading / (1 + survived)
    still = float(_passed(rooms, shares, tail, np.zeros((1, 1)), factor)[0])
    still *= min(known / KNOWING_PEAKS, 1.0)
    if growth.weight == 0:
        return TRUST * still
    slopes = np.maximum(growth.slope + growth.deviation * _NODES, 0)
    growing = _passed(rooms, shares, tail, slopes[:, None] * _AHEAD, factor)
    mean = float(growing @ _NODE_WEIGHTS) * min(known / KNOWING_GROWTH, 1.0)
    return TRUST * ((1 - growth.weight) * still + growth.weight * mean)


def _passed(rooms: Array, shares: Array, tail: ErrorTail, grown: Array, readings: float) -> Array:
    """Return, for each row of growth over the horizon, the probability that a peak passes."""
    left = rooms[None, None, :] - grown[:, :, None]
    each = np.minimum(tail.all_passed(left) @ shares, MOST_RISK)
    return np.asarray(1 - np.exp(readings * np.log1p(-each).mean(axis=1)))
