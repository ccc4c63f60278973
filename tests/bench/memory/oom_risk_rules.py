"""Three rules that forecast an OOM after every step: zerowatch's, a threshold, a straight line.

All read the same: peaks with what fragmentation makes unusable, and the limit. The threshold is
that at which peers warn, 92 % of the limit. The line is a least-squares fit to the last 100
readings, with normal errors around it: the probability that one of the next 50 steps passes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from bench.memory.oom_risk_runs import Run

from zerowatch.runtime.memory.forecast.forecaster import Forecaster

Array = npt.NDArray[np.float64]
HORIZON = 50
FORECAST_EVERY = 4  # readings; a live one is asked once a second, with four readings at most
THRESHOLD = 0.92
LINE_READINGS, MIN_READINGS = 100, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Forecasts of one run.

    Attributes:
        risk: Probability of an OOM within the next 50 steps, as known after each completed step;
            NaN before the first forecast.
        batch_risk: Probability that each step's micro-batch does not fit, as it began.
    """

    risk: Array
    batch_risk: Array


def forecast(run: Run) -> Forecast:
    """Follow a run with our forecaster, as a live one would."""
    forecaster, latest = Forecaster(), None
    risk = np.full(len(run.shapes), np.nan)
    batch_risk = np.zeros(len(run.shapes))
    points = {point.step: point for point in run.points}
    read = 0
    for step, shape in enumerate(run.shapes):
        if latest is not None:
            batch_risk[step] = latest.batch_risk(shape)
        if step in points:
            forecaster.add(points[step])
            read += 1
            if read % FORECAST_EVERY == 0:
                latest = forecaster.forecast()
        if latest is not None:
            risk[step] = latest.risk_ratio
    return Forecast(risk=risk, batch_risk=batch_risk)


def over_threshold(run: Run) -> Array:
    """Return 1 where the last reading is over the threshold, and 0 elsewhere."""
    over = [
        float(point.peak_bytes + point.fragmented_bytes >= THRESHOLD * point.limit_bytes)
        for point in run.points
    ]
    return _each_step(run, np.array(over))


def along_line(run: Run) -> Array:
    """Return the risk by a straight line through the last readings."""
    steps = np.array([point.step for point in run.points], dtype=float)
    needs = np.array([point.peak_bytes + point.fragmented_bytes for point in run.points])
    limit = run.points[0].limit_bytes
    risks = np.zeros(len(steps))
    ahead = np.arange(1, HORIZON + 1, 7) + 3.0
    for last in range(MIN_READINGS, len(steps) + 1):
        x = steps[max(0, last - LINE_READINGS) : last]
        y = needs[max(0, last - LINE_READINGS) : last]
        away = x - x.mean()
        slope = float(away @ y) / float(away @ away)
        around = y - y.mean() - slope * away
        width = math.sqrt(float(around @ around) / (len(x) - 2)) + 1.0
        room = limit - (y.mean() + slope * (x[-1] - x.mean() + ahead))
        fits = [0.5 * math.erfc(-each / width / math.sqrt(2)) for each in room.tolist()]
        risks[last - 1] = 1 - math.prod(fits) ** 7
    return _each_step(run, risks)


def _each_step(run: Run, values: Array) -> Array:
    """Give each step the value of the last reading until then."""
    read = np.searchsorted(
        [point.step for point in run.points], np.arange(len(run.shapes)), "right"
    )
    return np.where(read > 0, values[np.maximum(read - 1, 0)], 0.0)
