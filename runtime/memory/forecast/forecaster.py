"""Follows the memory of one device and forecasts it; for the watch thread."""

from __future__ import annotations

from collections import deque
from itertools import islice
from math import inf

import numpy as np
import numpy.typing as npt

from .error_tail import ErrorTail, fit_tail
from .memory_forecast import MemoryForecast
from .peak_model import PeakModel, fit_peaks
from .prediction_errors import KEPT, PredictionErrors, median_ratio
from .recent_batches import brought_forward, recent_batches, with_larger
from .risk import Growth, combine, growing_weight, risk_ahead
from .series import PeakPoint
from .trend import Trend, fit_trend

Array = npt.NDArray[np.float64]
KEPT_POINTS, FITTED_POINTS, RECENT_POINTS = 512, 256, 200
# The first steps are unlike the rest: optimizer states appear, kernels are chosen.
WARM_UP_POINTS = 3
KEPT_RATIOS = 256
# The risk that is told is the mean of those found in so many steps.
SMOOTHING_STEPS = 20
REFIT_AFTER, REFIT_SHARE = 8, 0.1
# Readings in a row that must be far off, and how far, before the past is taken for another regime.
REGIME_POINTS, REGIME_WIDTHS = 4, 8.0
# CUDA's allocator reserves in blocks of 2 MiB; RSS wavers by as much.
LEAST_WIDTH_BYTES, LEAST_WIDTH_RATIO = float(1 << 20), 2e-4
EXPECTED_WIDTH_RATIO = 0.01
_STEP, _FLOOR, _UNUSABLE = range(3)


class Forecaster:
    """Keeps the last readings of one device, and a model of its peaks."""

    def __init__(self) -> None:
        self._points: deque[PeakPoint] = deque(maxlen=KEPT_POINTS)
        self._rows = np.empty((2 * KEPT_POINTS, 3))
        self._num_rows = 0
        self._since_fit = 0
        self._warm_up = WARM_UP_POINTS
        self._model: PeakModel | None = None
        self._misses: PredictionErrors | None = None  # by this model
        self._ratios: deque[float] = deque(maxlen=KEPT_RATIOS)
        self._reservable = inf
        self._since_refusal = 0
        # As of the last outlook:
        self._floor = self._unusable = Trend(level=0.0)
        self._width = inf
        self._risks: deque[tuple[int, float]] = deque()

    def add(self, point: PeakPoint) -> None:
        """Take in a reading, and note by how much it was mispredicted."""
        if self._warm_up > 0:
            self._warm_up -= 1
            return
        if self._misses is not None and self._points:
            said = self._misses.note(self._points[-1], point)
            self._ratios.append(abs(point.peak_bytes - said) / max(point.peak_bytes, 1.0))
        self._note_refusal(point)
        self._points.append(point)
        if self._num_rows == len(self._rows):
            self._rows[:KEPT_POINTS] = self._rows[KEPT_POINTS:]
            self._num_rows = KEPT_POINTS
        self._rows[self._num_rows] = (point.step, point.floor_bytes, point.unusable_bytes)
        self._num_rows += 1
        self._since_fit += 1

    def _note_refusal(self, point: PeakPoint) -> None:
        """Learn from a retry that no more can be reserved than is, whatever the limit says."""
        self._since_refusal += 1
        if self._points and point.retries > self._points[-1].retries:
            self._since_refusal = 0
            self._reservable = point.reserved_bytes
        elif self._since_refusal > KEPT_POINTS:
            self._reservable = inf
        else:
            self._reservable = max(self._reservable, point.reserved_bytes)

    def outlook(self) -> MemoryForecast | None:
        """Forecast from all that was taken in; None while too little is known."""
        count = len(self._points)
        due = max(min(REFIT_AFTER, count // 4), REFIT_SHARE * count, 1)
        if self._since_fit >= due or self._is_far_off():
            self._refit()
        if self._model is None or self._misses is None:
            return None
        return self._look_ahead(self._model, self._misses)

    def _refit(self) -> None:
        fitted = fit_peaks(self._last(FITTED_POINTS))
        if fitted is None:
            return
        self._since_fit = 0
        self._take(fitted)
        if self._is_far_off():
            self._forget()

    def _is_far_off(self) -> bool:
        """Say whether the model misses the last readings, all of them and alike: a new regime."""
        if self._misses is None or len(self._points) < 3 * REGIME_POINTS:
            return False
        last = list(self._misses.errors)[-REGIME_POINTS:]
        far = REGIME_WIDTHS * self._width
        return min(last) > far or max(last) < -far

    def _forget(self) -> None:
        """Begin anew from the last few readings; the old model serves until they yield one."""
        kept = self._last(REGIME_POINTS + 1)
        self._risks.clear()
        self._points.clear()
        self._num_rows = 0
        for point in kept:
            self.add(point)
        self._ratios.clear()
        fitted = fit_peaks(kept) or self._model
        if fitted is not None:
            self._take(fitted)

    def _take(self, model: PeakModel) -> None:
        self._model, self._misses = model, PredictionErrors(model, self._last(KEPT + 1))

    def _last(self, count: int) -> list[PeakPoint]:
        return list(islice(self._points, max(0, len(self._points) - count), None))

    def _look_ahead(self, model: PeakModel, misses: PredictionErrors) -> MemoryForecast:
        last, recent = self._points[-1], self._last(RECENT_POINTS)
        need = last.peak_bytes + last.unusable_bytes
        least = max(LEAST_WIDTH_BYTES, LEAST_WIDTH_RATIO * need)
        rows = self._rows[max(0, self._num_rows - KEPT_POINTS) : self._num_rows]
        self._look_at_trends(rows, least)
        found = recent_batches(model, recent, self._floor.level)
        steps = rows[-len(recent) :, _STEP]
        shapes = fit_trend(steps, found.peaks, least) if np.ptp(found.peaks) else Trend(level=0.0)
        tail = fit_tail(np.array(misses.errors), expected=EXPECTED_WIDTH_RATIO * need, least=least)
        self._width = tail.width
        predicted = model.predict(found.largest, last.floor_bytes)
        limit = min(last.limit_bytes, self._reservable)
        headroom = limit - predicted - last.unusable_bytes
        per_reading = max(float(steps[-1] - steps[0]) / max(len(steps) - 1, 1), 1.0)
        growth = combine((self._floor, self._unusable, shapes), need, per_reading)
        peaks = found.peaks
        if growing_weight(shapes, need, per_reading) > 0.5:  # such as texts sorted by length
            peaks = brought_forward(steps, peaks, shapes)
        return MemoryForecast(
            step=last.step,
            predicted_peak_bytes=predicted,
            headroom_bytes=headroom,
            risk_ratio=self._smoothed(self._risk(limit, peaks, growth, tail, misses, per_reading)),
            eta_steps=_eta(headroom, growth),
            error_ratio=median_ratio(self._ratios),
            limit_bytes=limit,
            model=model,
            floor_bytes=last.floor_bytes,
            unusable_bytes=last.unusable_bytes,
            tail=tail,
        )

    def _smoothed(self, risk: float) -> float:
        """Return the mean risk of late: what is seen for a moment only is no alarm."""
        step = self._points[-1].step
        while self._risks and self._risks[0][0] <= step - SMOOTHING_STEPS:
            self._risks.popleft()
        self._risks.append((step, risk))
        return sum(risk for _, risk in self._risks) / len(self._risks)

    def _look_at_trends(self, rows: Array, least: float) -> None:
        steps = rows[:, _STEP]
        self._floor = fit_trend(steps, rows[:, _FLOOR], least)
        if rows[-1, _UNUSABLE]:
            self._unusable = fit_trend(steps, rows[:, _UNUSABLE], least)

    def _risk(
        self,
        limit: float,
        peaks: Array,
        growth: Growth,
        tail: ErrorTail,
        misses: PredictionErrors,
        per_reading: float,
    ) -> float:
        if limit == inf:
            return 0.0
        values, shares = with_larger(peaks, self._floor.level)
        tail = tail.widened(float(np.hypot(self._floor.noise, self._unusable.noise)))
        return risk_ahead(
            limit - self._unusable.level - values,
            shares,
            tail,
            growth,
            per_reading=per_reading,
            survived=float(tail.all_passed(np.array(misses.rooms)).sum()),
            known=len(self._points) * per_reading,
        )


def _eta(headroom: float, growth: Growth) -> float:
    """Return the steps until the median peak passes the limit; infinite if nothing grows."""
    if headroom <= 0:
        return 0.0
    return headroom / growth.slope if growth.weight > 0.5 and growth.slope > 0 else inf
