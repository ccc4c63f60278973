"""Forecasts the memory of one device from the readings of its last steps.

`Forecaster` keeps the readings and runs on the watch thread. Its result, `MemoryForecast`, is plain
data that any thread may read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from math import inf

import numpy as np
import numpy.ma  # np.median would import it at its first call, during training
import numpy.typing as npt

from ...common.gil_pauses import let_training_run
from .peak_model import PeakModel, fit_peaks
from .peak_readings import PeakPoint, Shape
from .risk import ErrorTail, Growth, combine_trends, fit_tail, growing_weight, risk_ahead
from .trend import Trend, fit_trend

Array = npt.NDArray[np.float64]

# Maximum values kept, in this order: readings; recent readings, whose micro-batches are expected to
# come again; errors of prediction; relative errors for the published median.
MAX_POINTS = 512
RECENT_POINTS = 200
MAX_ERRORS = 192
MAX_RATIOS = 256
# Number of readings that a model is fitted to.
FITTED_POINTS = 256
# The first readings are skipped. In the first steps optimizer states are created and kernels are
# chosen, so their memory differs from later steps.
WARM_UP_POINTS = 3
# The published risk is the mean of the risks of this many steps.
SMOOTHING_STEPS = 20
# A model is fitted again after this many new readings, or after this share of all readings if the
# share is larger.
REFIT_AFTER = 8
REFIT_SHARE = 0.1
# The regime has changed if this many consecutive readings differ from the predictions by this many
# widths, all in the same direction.
REGIME_POINTS = 4
REGIME_WIDTHS = 8.0
# After this many consecutive readings without fragmentation, its trend is no longer fitted.
ZERO_POINTS = 4
# Minimum width of the errors, in bytes and relative to the need. CUDA's allocator reserves blocks
# of 2 MiB, and RSS fluctuates by a similar amount.
MIN_WIDTH_BYTES = float(1 << 20)
MIN_WIDTH_RATIO = 2e-4
# Width of the errors that is assumed before any error is known, relative to the need.
EXPECTED_WIDTH_RATIO = 0.01
# If a batch is larger than any observed batch, this share of its additional need is added to the
# prediction error.
EXTRAPOLATION_RATIO = 0.05
# Possible distances of the next record from the largest of N values, in mean excesses of the upper
# tenth. The three distances are equally likely.
_RECORD_EXCESSES = np.array((0.25, 0.75, 1.75))
# A peak counts as equal to the largest peak if they differ by less than this share of the rise.
_SAME_RATIO = 1e-3
# Columns of the table of readings.
_STEP, _FLOOR, _FRAGMENTED = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForecast:
    """The forecast of one device's memory after a given step.

    Its methods are cheap enough for the training thread, and do not access a device.

    Attributes:
        step: The last step that the forecast is based on.
        predicted_peak_bytes: The median peak of the next step, if its micro-batch is the largest of
            the last 200 readings.
        headroom_bytes: Limit minus `predicted_peak_bytes` and minus fragmented memory. Infinite
            without a limit.
        risk_ratio: Probability that a peak within the next 50 steps exceeds the limit, averaged
            over the last 20 steps. It is at most 0.87, because the forecast itself may be wrong.
        eta_steps: Steps until the median peak exceeds the limit. Infinite without growth.
        error_ratio: Median absolute error of the last predictions, relative to the observed peak.
        limit_bytes: The current limit, or the reserved bytes at the allocator's last retry.
            Infinite if neither is known.
        model: Predicts a peak from micro-batches and the memory in use between steps.
        between_steps_bytes: Memory in use before the next step.
        fragmented_bytes: Memory lost to fragmentation in the next step.
        tail: Distribution of the errors of predicting the next step.
    """

    step: int
    predicted_peak_bytes: float
    headroom_bytes: float
    risk_ratio: float
    eta_steps: float
    error_ratio: float
    limit_bytes: float
    model: PeakModel
    between_steps_bytes: float
    fragmented_bytes: float
    tail: ErrorTail

    def predict_peak(self, shape: Shape) -> float:
        """Return the median peak, in bytes, of a step with this micro-batch."""
        return self.model.predict((shape,), self.between_steps_bytes)

    def batch_risk(self, shape: Shape) -> float:
        """Return the probability that this micro-batch exceeds the limit if it runs next."""
        if self.limit_bytes == inf:
            return 0.0
        predicted = self.predict_peak(shape)
        margin = self.limit_bytes - self.fragmented_bytes - predicted
        further = predicted - self.predicted_peak_bytes
        if further > 0:
            margin *= self.tail.width / (self.tail.width + EXTRAPOLATION_RATIO * further)
        return self.tail.exceedance(margin)


class Forecaster:
    """Forecasts the memory of one device from its last readings and a model of its peaks.

    Examples:
        >>> forecaster = Forecaster()
        >>> forecaster.add(point)  # after each step
        >>> forecast = forecaster.forecast()  # None until a few steps are known
    """

    def __init__(self) -> None:
        self._points: deque[PeakPoint] = deque(maxlen=MAX_POINTS)
        self._rows = np.empty((2 * MAX_POINTS, 3))
        self._num_rows = 0
        self._since_fit = 0
        self._warm_up = WARM_UP_POINTS
        self._model: PeakModel | None = None
        self._errors: PredictionErrors | None = None  # of the current model
        self._ratios: deque[float] = deque(maxlen=MAX_RATIOS)
        self._reservable = inf
        self._since_retry = 0
        # State of the last forecast:
        self._floor = self._fragmented = Trend(level=0.0)
        self._width = inf
        self._risks: deque[tuple[int, float]] = deque()

    def add(self, point: PeakPoint) -> None:
        """Add a reading, and record the error of the prediction that was made for this reading.

        If its step is not after the last one, the training state was rolled back, e.g. to a
        checkpoint. The readings before are then discarded, because trends need ascending steps.
        """
        if self._warm_up > 0:
            self._warm_up -= 1
            return
        if self._points and point.step <= self._points[-1].step:
            self._discard_readings()
        if self._errors is not None and self._points:
            predicted = self._errors.add(self._points[-1], point)
            self._ratios.append(abs(point.peak_bytes - predicted) / max(point.peak_bytes, 1.0))
        self._update_reservable(point)
        self._points.append(point)
        if self._num_rows == len(self._rows):
            self._rows[:MAX_POINTS] = self._rows[MAX_POINTS:]
            self._num_rows = MAX_POINTS
        self._rows[self._num_rows] = (point.step, point.between_steps_bytes, point.fragmented_bytes)
        self._num_rows += 1
        self._since_fit += 1

    def forecast(self) -> MemoryForecast | None:
        """Return a forecast based on all readings, or None if there are too few readings."""
        count = len(self._points)
        due = max(min(REFIT_AFTER, count // 4), REFIT_SHARE * count, 1)
        if self._since_fit >= due or self._has_regime_changed():
            self._refit()
        let_training_run()
        if self._model is None or self._errors is None:
            return None
        return self._forecast(self._model, self._errors)

    def successor(self) -> Forecaster:
        """Return a forecaster without readings, for steps that use memory differently.

        The micro-batches before would otherwise be expected to come again. The limit stays.
        """
        new = Forecaster()
        new._warm_up = self._warm_up
        new._reservable, new._since_retry = self._reservable, self._since_retry
        return new

    def _update_reservable(self, point: PeakPoint) -> None:
        """After an allocator retry, use the reserved bytes as the limit, even if higher."""
        self._since_retry += 1
        if self._points and point.retries > self._points[-1].retries:
            self._since_retry = 0
            self._reservable = point.reserved_bytes
        elif self._since_retry > MAX_POINTS:
            self._reservable = inf
        else:
            self._reservable = max(self._reservable, point.reserved_bytes)

    def _refit(self) -> None:
        fitted = fit_peaks(self._last(FITTED_POINTS))
        if fitted is None:
            return
        self._since_fit = 0
        self._set_model(fitted)
        if self._has_regime_changed():
            self._restart()

    def _has_regime_changed(self) -> bool:
        """Return whether all of the last readings are far from the model, on the same side."""
        if self._errors is None or len(self._points) < 3 * REGIME_POINTS:
            return False
        last = list(self._errors.errors)[-REGIME_POINTS:]
        far = REGIME_WIDTHS * self._width
        return min(last) > far or max(last) < -far

    def _restart(self) -> None:
        """Keep only the last few readings. The old model is used until they give a new one."""
        kept = self._last(REGIME_POINTS + 1)
        self._discard_readings()
        for point in kept:
            self.add(point)
        self._ratios.clear()
        fitted = fit_peaks(kept) or self._model
        if fitted is not None:
            self._set_model(fitted)

    def _discard_readings(self) -> None:
        """Discard the readings and their risks. The model, its errors and the limit stay."""
        self._points.clear()
        self._num_rows = 0
        self._risks.clear()

    def _set_model(self, model: PeakModel) -> None:
        let_training_run()
        self._model, self._errors = model, PredictionErrors(model, self._last(MAX_ERRORS + 1))

    def _last(self, count: int) -> list[PeakPoint]:
        return list(islice(self._points, max(0, len(self._points) - count), None))

    def _forecast(self, model: PeakModel, errors: PredictionErrors) -> MemoryForecast:
        last, recent = self._points[-1], self._last(RECENT_POINTS)
        need = last.peak_bytes + last.fragmented_bytes
        min_width = max(MIN_WIDTH_BYTES, MIN_WIDTH_RATIO * need)
        rows = self._rows[max(0, self._num_rows - MAX_POINTS) : self._num_rows]
        self._fit_trends(rows, min_width)
        let_training_run()
        predicted_peaks = predict_recent(model, recent, self._floor.level)
        let_training_run()
        steps = rows[-len(recent) :, _STEP]
        shapes = (
            fit_trend(steps, predicted_peaks.peaks, min_width)
            if np.ptp(predicted_peaks.peaks)
            else Trend(level=0.0)
        )
        tail = fit_tail(
            np.array(errors.errors), expected=EXPECTED_WIDTH_RATIO * need, min_width=min_width
        )
        self._width = tail.width
        let_training_run()
        predicted = model.predict(predicted_peaks.largest, last.between_steps_bytes)
        limit = min(last.limit_bytes, self._reservable)
        headroom = limit - predicted - last.fragmented_bytes
        per_reading = max(float(steps[-1] - steps[0]) / max(len(steps) - 1, 1), 1.0)
        let_training_run()
        growth = combine_trends((self._floor, self._fragmented, shapes), need, per_reading)
        peaks = predicted_peaks.peaks
        if growing_weight(shapes, need, per_reading) > 0.5:  # such as texts sorted by length
            peaks = extrapolate(steps, peaks, shapes)
        let_training_run()
        risk = self._smoothed(self._risk(limit, peaks, growth, tail, errors, per_reading))
        let_training_run()
        return MemoryForecast(
            step=last.step,
            predicted_peak_bytes=predicted,
            headroom_bytes=headroom,
            risk_ratio=risk,
            eta_steps=_eta(headroom, growth),
            error_ratio=float(np.median(self._ratios)) if self._ratios else 0.0,
            limit_bytes=limit,
            model=model,
            between_steps_bytes=last.between_steps_bytes,
            fragmented_bytes=last.fragmented_bytes,
            tail=tail,
        )

    def _smoothed(self, risk: float) -> float:
        """Return the mean risk of the last SMOOTHING_STEPS, so one outlier raises no alarm."""
        step = self._points[-1].step
        while self._risks and self._risks[0][0] <= step - SMOOTHING_STEPS:
            self._risks.popleft()
        self._risks.append((step, risk))
        return sum(risk for _, risk in self._risks) / len(self._risks)

    def _fit_trends(self, rows: Array, min_width: float) -> None:
        steps = rows[:, _STEP]
        self._floor = fit_trend(steps, rows[:, _FLOOR], min_width)
        fragmented = rows[:, _FRAGMENTED]
        self._fragmented = (
            fit_trend(steps, fragmented, min_width)
            if fragmented[-ZERO_POINTS:].any()
            else Trend(level=0.0)
        )

    def _risk(
        self,
        limit: float,
        peaks: Array,
        growth: Growth,
        tail: ErrorTail,
        errors: PredictionErrors,
        per_reading: float,
    ) -> float:
        if limit == inf:
            return 0.0
        values, shares = add_records(peaks, self._floor.level)
        let_training_run()
        tail = tail.widened(float(np.hypot(self._floor.noise, self._fragmented.noise)))
        survived = float(tail.exceedances(np.array(errors.margins)).sum())
        let_training_run()
        return risk_ahead(
            limit - self._fragmented.level - values,
            shares,
            tail,
            growth,
            per_reading=per_reading,
            survived=survived,
            known=len(self._points) * per_reading,
        )


class PredictionErrors:
    """Records the prediction errors of one model, for its last MAX_ERRORS readings.

    Attributes:
        errors: Observed minus predicted peak in bytes, including fragmented memory. Memory that
            appeared in a step and stayed counts as growth of the floor, not as an error.
        margins: Limit minus predicted peak, in bytes.
    """

    def __init__(self, model: PeakModel, points: Sequence[PeakPoint]) -> None:
        self.errors: deque[float] = deque(maxlen=MAX_ERRORS)
        self.margins: deque[float] = deque(maxlen=MAX_ERRORS)
        self._model = model
        for number, (before, point) in enumerate(pairwise(points[-MAX_ERRORS - 1 :])):
            self.add(before, point)
            if number % 16 == 0:
                let_training_run()

    def add(self, before: PeakPoint, point: PeakPoint) -> float:
        """Add a reading and its predecessor. Return the predicted peak of the reading in bytes."""
        predicted = self._model.predict(point.shapes, before.between_steps_bytes)
        error = point.peak_bytes - predicted
        if error > 0 and point.between_steps_bytes > before.between_steps_bytes:
            since = point.peak_bytes - self._model.predict(point.shapes, point.between_steps_bytes)
            error = max(since, 0.0)
        error += point.fragmented_bytes - before.fragmented_bytes
        self.errors.append(error)
        needed = point.peak_bytes + point.fragmented_bytes
        self.margins.append(point.limit_bytes - needed + error)
        return predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentPeaks:
    """The peaks, in bytes, that recent micro-batches would have if they ran now.

    Attributes:
        peaks: The peak of each reading.
        largest: The micro-batches of the reading with the largest peak.
    """

    peaks: Array
    largest: tuple[Shape, ...]


def predict_recent(
    model: PeakModel, points: Sequence[PeakPoint], between_steps_bytes: float
) -> RecentPeaks:
    """Predict the peak of each reading from the current floor. Predict each shape only once."""
    known: dict[tuple[Shape, ...], float] = {}
    for point in points:
        if point.shapes not in known:
            known[point.shapes] = model.predict(point.shapes, between_steps_bytes)
    return RecentPeaks(
        peaks=np.array([known[point.shapes] for point in points]),
        largest=max(known, key=lambda shapes: known[shapes]),
    )


def extrapolate(steps: Array, peaks: Array, trend: Trend) -> Array:
    """Return the peaks that a trend covers. Each peak is moved along the trend to the last step."""
    stretch = slice(-trend.points, None)
    grown: Array = peaks[stretch] + trend.slope * (steps[-1] - steps[stretch])
    return grown


def add_records(peaks: Array, between_steps_bytes: float) -> tuple[Array, Array]:
    """Return possible peaks and their probabilities: the observed peaks, and some larger peaks.

    By symmetry, the last of N + 1 peaks is the maximum with probability 1 / (N + 1). If several
    peaks are equal to the maximum, lengths are capped or have few values. In this case no larger
    peak is expected.
    """
    values, counts = np.unique(peaks, return_counts=True)
    total = len(peaks)
    at_maximum = values >= values[-1] - _SAME_RATIO * (values[-1] - between_steps_bytes)
    repeats = int(counts[at_maximum].sum())
    record = 10.0 ** (1 - repeats) / (total + 1)
    if len(values) < 4 or repeats > 3:
        return values, counts / total
    upper = np.quantile(peaks, 0.9)
    excess = float((peaks[peaks >= upper] - upper).mean())
    larger = values[-1] + excess * _RECORD_EXCESSES
    shares = np.concatenate((counts / total * (1 - record), np.full(3, record / 3)))
    return np.concatenate((values, larger)), shares


def _eta(headroom: float, growth: Growth) -> float:
    """Return the steps until the median peak exceeds the limit, or infinity without growth."""
    if headroom <= 0:
        return 0.0
    return headroom / growth.slope if growth.weight > 0.5 and growth.slope > 0 else inf
