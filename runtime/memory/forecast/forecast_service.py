"""Keeps each device's memory forecast up to date during a run, publishes it, and logs warnings."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from ....metrics.catalog import memory
from ....metrics.recorder import Recorder
from ....metrics.thresholds import OOM_RISK_HIGH
from ...common.format_numbers import format_bytes
from ...common.gil_pauses import let_training_run
from .forecaster import Forecaster, MemoryForecast
from .peak_readings import PeakPoint, PeakPrediction, Shape

logger = logging.getLogger(__name__)

# A forecast is updated every second only if it is near the limit, and otherwise after FAR_SECONDS.
# If it is very far from the limit, and so are all readings since, that is after VERY_FAR_SECONDS.
# Computing a forecast takes 2 to 4 ms with cold caches, and all threads of the watch may take 3 ms
# per second.
FAR_SECONDS = 5.0
VERY_FAR_SECONDS = 15.0
# A forecast is near the limit if fewer than NEAR_STEPS steps remain, or if the headroom is below
# this share of the limit.
NEAR_STEPS = 500
NEAR_RATIO = 0.3
# It is very far from the limit with at least so many steps and this share of the limit left, and
# with a risk below VERY_FAR_RISK.
VERY_FAR_STEPS = 5000
VERY_FAR_RATIO = 0.6
VERY_FAR_RISK = 0.01
# After a warning, the risk must fall below this value before the next warning is logged.
REARM_RISK = 0.3
# Minimum time between two warnings about single batches. A script may catch out-of-memory errors
# and continue with batches that are as large.
BATCH_ALARM_SECONDS = 60.0
LAST_PEAKS = 20
# A job may alternate between several uses of memory, as in a trial of the tuner. The readings of
# this many uses are kept, each until the use has been left for this many steps.
MAX_USES = 8
KEPT_STEPS = 200
MAX_CHANGES = 256  # changes of use since the last reading
_GAUGES = (
    memory.MEMORY_PREDICTED_PEAK,
    memory.MEMORY_PREDICTION_ERROR,
    memory.MEMORY_HEADROOM,
    memory.OOM_RISK,
    memory.OOM_ETA_STEPS,
    memory.OOM_NEXT_BATCH_RISK,
)


@dataclass(frozen=True, slots=True)
class ForecastState:
    """The risks, forecasts and alarms of `MemoryForecasts`, and its last readings by device."""

    risks: Mapping[str, float]
    forecasts: Mapping[str, MemoryForecast]
    alarm_steps: Mapping[str, int | None]
    last: Mapping[str, Sequence[tuple[PeakPoint, PeakPrediction]]]


@dataclass(slots=True)
class _MemoryUse:
    """The steps that use memory in one way, such as with one size of micro-batches.

    Attributes:
        forecasters: Their forecasters, by device.
        forecasts: Their last forecasts, by device.
        risks: Their last risks, by device.
        last_step: Their last step that was read.
    """

    forecasters: dict[str, Forecaster] = field(default_factory=dict)
    forecasts: Mapping[str, MemoryForecast] = field(default_factory=dict)
    risks: Mapping[str, float] = field(default_factory=dict)
    last_step: int = 0

    def successor(self) -> _MemoryUse:
        """Return a use that has no readings yet."""
        return _MemoryUse({device: each.successor() for device, each in self.forecasters.items()})


class MemoryForecasts:
    """Keeps a forecaster of each device, publishes its forecasts, and warns of high risks.

    Each use of memory has its own forecasters. See `restart`.

    `assess_batch` and `restart` run on the training thread, everything else on the watch thread.

    Attributes:
        risks: The current risk by device. A device is missing while its risk is unknown.
        forecasts: The current forecast by device. The mapping is replaced as a whole, so any thread
            may read it.
        alarm_steps: The first step of the current alarm by device, or None without an alarm.
        known_risks: The risks of the shapes assessed by the current forecasts, by device. It lacks
            shapes with a high risk, of which each batch is assessed. The mapping is replaced when
            the forecasts are, and when the highest risk is taken.
        are_very_far: Whether there are forecasts, and all of them are very far from the limit.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.risks: Mapping[str, float] = {}
        self.forecasts: Mapping[str, MemoryForecast] = {}
        self.alarm_steps: dict[str, int | None] = {}
        self._recorder = recorder
        self._use_read = _MemoryUse()  # of the last reading
        self._uses: dict[Hashable, _MemoryUse] = {None: self._use_read}
        # The changes of use that no reading has followed yet: the last step before, and the use.
        self._changes: deque[tuple[int, Hashable]] = deque(maxlen=MAX_CHANGES)
        self._use_wanted: Hashable = None  # of the next step
        self._last: dict[str, deque[tuple[PeakPoint, PeakPrediction]]] = {}
        self._updated_at, self._pause_seconds = -math.inf, 0.0
        self._stale = False
        self._batch_risk: dict[str, float] = {}
        self.known_risks: dict[Shape, dict[str, float]] = {}
        self.are_very_far = False
        self._max_batch_risks: dict[str, float] = {}
        self._batch_alarm_due = 0.0
        self._published: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._is_unknown = False  # since a restart

    def add(self, points: Mapping[str, PeakPoint]) -> None:
        """Add the readings at the end of a step, by device."""
        if not points:
            return
        step = max(point.step for point in points.values())
        self._enter_use_of(step)
        use = self._use_read
        use.last_step = step
        for device, point in points.items():
            use.forecasters.setdefault(device, Forecaster()).add(point)
            last = self._last.setdefault(device, deque(maxlen=LAST_PEAKS))
            last.append((point, _prediction(use, device, point)))
            self._stale = True
            left_bytes = point.limit_bytes - point.peak_bytes - point.fragmented_bytes
            if left_bytes < VERY_FAR_RATIO * point.limit_bytes:
                self._pause_seconds = min(self._pause_seconds, FAR_SECONDS)
                self.are_very_far = False

    def reset(self) -> None:
        """Discard all readings, because a new engine needs another amount of memory."""
        with self._lock:
            self._use_read = _MemoryUse()
            self._uses = {} if self._changes else {self._use_wanted: self._use_read}
            self._show(None)
        self._stale = True  # the metrics of the old engine are removed
        self._pause_seconds = 0.0

    def restart(self, *, after_step: int, use: Hashable) -> None:
        """Forecast from the readings of one use of memory only, from the next step on.

        Another micro-batch or memory saving is another use. Its risks are unknown until there are
        enough readings. A use that was left a short time ago keeps its readings.

        Args:
            after_step: The last step before the change.
            use: Identifies the use.
        """
        with self._lock:
            if self._changes and after_step < self._changes[-1][0]:
                self._changes.clear()  # a checkpoint was loaded
            self._changes.append((after_step, use))
            self._use_wanted = use
            self._show(self._recent_use(use, after_step))
            self._max_batch_risks = {}
            self._stale, self._pause_seconds = True, 0.0
            self._is_unknown = not self.forecasts

    def state(self) -> ForecastState:
        """Return what a report on an error needs, as plain values."""
        last = {device: tuple(points) for device, points in self._last.items()}
        return ForecastState(self.risks, self.forecasts, dict(self.alarm_steps), last)

    def restore(self, state: ForecastState) -> None:
        """Take over the state of the forecasts of another process. Any thread may call this."""
        self.risks, self.forecasts = state.risks, state.forecasts
        self.known_risks, self.are_very_far = {}, _are_very_far(state.forecasts)
        self.alarm_steps = dict(state.alarm_steps)
        self._last = {
            device: deque(points, maxlen=LAST_PEAKS) for device, points in state.last.items()
        }

    def take_batch_risks(self) -> Mapping[str, float]:
        """Return the highest risk of a micro-batch since the last call, by device."""
        risks, self._max_batch_risks = self._max_batch_risks, {}
        self.known_risks = {}  # after it, so that each shape counts again
        return risks

    def add_batch_risks(self, risks: Mapping[str, float]) -> None:
        """Add risks of micro-batches that another process has assessed."""
        known = self._max_batch_risks
        self._max_batch_risks = {
            device: max(known.get(device, 0.0), risks.get(device, 0.0))
            for device in known.keys() | risks.keys()
        }

    def last_peaks(self, device: str) -> list[PeakPoint]:
        """Return the last readings of a device, oldest first."""
        return [point for point, _ in list(self._last.get(device, ()))]

    def last_predictions(self, device: str) -> list[PeakPrediction]:
        """Return the predictions made for the last readings, oldest first."""
        return [prediction for _, prediction in list(self._last.get(device, ()))]

    def predict_peak(self, device: str, shape: Shape) -> float | None:
        """Return the median peak of this micro-batch in bytes, or None without a forecast."""
        forecast = self.forecasts.get(device)
        return None if forecast is None else forecast.predict_peak(shape)

    def batch_risk(self, device: str) -> float | None:
        """Return the risk of the current micro-batch, computed when the micro-batch began."""
        return self._batch_risk.get(device)

    def assess_batch(self, shape: Shape) -> None:
        """Compute the risk of a micro-batch that is about to run, and warn if the risk is high."""
        known_risks = self.known_risks
        if shape in known_risks:  # most batches have the same shape
            self._batch_risk = known_risks[shape]
            return
        self._batch_risk = risks = {}
        for device, forecast in self.forecasts.items():
            risk = risks[device] = forecast.batch_risk(shape)
            if risk > self._max_batch_risks.get(device, -1.0):
                self._max_batch_risks[device] = risk
            if risk >= OOM_RISK_HIGH:
                self._warn_of_batch(device, shape, forecast, risk)
        if max(risks.values(), default=0.0) < OOM_RISK_HIGH:
            known_risks[shape] = risks

    def update(self) -> None:
        """Compute and publish new forecasts if new readings exist and an update is due."""
        now = time.monotonic()
        if not self._stale or now < self._updated_at + self._pause_seconds:
            return
        self._stale = False
        let_training_run()
        use = self._use_read
        forecasts = {device: each.forecast() for device, each in use.forecasters.items()}
        use.forecasts = {device: forecast for device, forecast in forecasts.items() if forecast}
        use.risks = {device: self._risk(device, each) for device, each in use.forecasts.items()}
        with self._lock:
            if self._changes:  # the last readings may be of another use than the next steps
                self._show(self._recent_use(self._use_wanted, self._changes[-1][0]))
            else:
                self._show(use)
            known, risks = self.forecasts, self.risks
            self._is_unknown = self._is_unknown and not known
            pause = 0.0 if self._is_unknown else FAR_SECONDS
            pauses = map(_pause_seconds, known.values())
            self._updated_at, self._pause_seconds = now, min(pauses, default=pause)
        let_training_run()
        batch_risks = self.take_batch_risks()
        with self._recorder.commit():
            for device in self._published - known.keys():
                self._remove(device)
            self._published = frozenset(known)
            for device, forecast in known.items():
                self._publish(device, forecast, risks[device])
                self._recorder.set(memory.OOM_NEXT_BATCH_RISK, batch_risks.get(device, 0.0), device)
        for device, forecast in known.items():
            self._warn(device, forecast, risks[device])

    def _enter_use_of(self, step: int) -> None:
        """Let the readings of a step be added to its use of memory."""
        with self._lock:
            while self._changes and step > self._changes[0][0]:
                after_step, key = self._changes.popleft()
                use = self._recent_use(key, after_step) or self._use_read.successor()
                self._uses.pop(key, None)
                self._uses[key] = self._use_read = use  # the last one entered is dropped last
                for dropped in list(self._uses)[:-MAX_USES]:
                    del self._uses[dropped]

    def _recent_use(self, key: Hashable, step: int) -> _MemoryUse | None:
        """Return a use whose readings are still of value after a step; None if there is none."""
        use = self._uses.get(key)
        return use if use is not None and 0 <= step - use.last_step <= KEPT_STEPS else None

    def _show(self, use: _MemoryUse | None) -> None:
        """Make the forecasts of a use the current ones; without a use there are none."""
        self.forecasts, self.risks = ({}, {}) if use is None else (use.forecasts, use.risks)
        self.known_risks, self.are_very_far = {}, _are_very_far(self.forecasts)

    def _risk(self, device: str, forecast: MemoryForecast) -> float:
        """Return the risk. It is 1 if memory already exceeds the limit, as it can with a budget."""
        last, _ = self._last[device][-1]
        return 1.0 if last.peak_bytes > last.limit_bytes else forecast.risk_ratio

    def _publish(self, device: str, forecast: MemoryForecast, risk: float) -> None:
        recorder = self._recorder
        recorder.set(memory.MEMORY_PREDICTED_PEAK, forecast.predicted_peak_bytes, device)
        recorder.set(memory.MEMORY_PREDICTION_ERROR, forecast.error_ratio, device)
        recorder.set(memory.OOM_RISK, risk, device)
        recorder.set(memory.OOM_ETA_STEPS, forecast.eta_steps, device)
        if math.isfinite(forecast.headroom_bytes):
            recorder.set(memory.MEMORY_HEADROOM, forecast.headroom_bytes, device)

    def _remove(self, device: str) -> None:
        """Remove the metrics of a device whose risk has become unknown."""
        for gauge in _GAUGES:
            self._recorder.remove(gauge, device)

    def _warn(self, device: str, forecast: MemoryForecast, risk: float) -> None:
        """Log once that memory is likely to run out, until the risk has been low again."""
        if risk < REARM_RISK:
            self.alarm_steps[device] = None
        elif risk >= OOM_RISK_HIGH and self.alarm_steps.get(device) is None:
            self.alarm_steps[device] = forecast.step
            logger.warning(
                "memory of %s %s: predicted peak %s, limit %s%s. Use a smaller micro-batch, or "
                "more sharding or offload.",
                device,
                "has exceeded its limit"
                if risk == 1.0
                else f"is likely to run out within 50 steps ({100 * risk:.0f} %)",
                format_bytes(forecast.predicted_peak_bytes),
                format_bytes(forecast.limit_bytes),
                f", about {forecast.eta_steps:.0f} steps left"
                if 1 <= forecast.eta_steps < math.inf
                else "",
            )

    def _warn_of_batch(
        self, device: str, shape: Shape, forecast: MemoryForecast, risk: float
    ) -> None:
        """Log at once, on the training thread, because the kernel may soon kill this process."""
        now = time.monotonic()
        if now < self._batch_alarm_due:
            return
        self._batch_alarm_due = now + BATCH_ALARM_SECONDS
        logger.warning(
            "this micro-batch (%d x %d) is likely not to fit into the memory of %s (%.0f %%): "
            "predicted peak %s, limit %s. Split it, or limit the sequence length.",
            shape.samples,
            shape.length,
            device,
            100 * risk,
            format_bytes(forecast.predict_peak(shape)),
            format_bytes(forecast.limit_bytes),
        )


def _prediction(use: _MemoryUse, device: str, point: PeakPoint) -> PeakPrediction:
    """Return the prediction for a reading, made by the last forecast before this reading."""
    forecast = use.forecasts.get(device)
    predictions = [] if forecast is None else [forecast.predict_peak(each) for each in point.shapes]
    return PeakPrediction(
        step=point.step,
        predicted_bytes=max(predictions, default=None),
        risk_ratio=use.risks.get(device),
    )


def _pause_seconds(forecast: MemoryForecast) -> float:
    """Return the time until the next update, by how far the limit is."""
    limit, eta_steps, headroom = forecast.limit_bytes, forecast.eta_steps, forecast.headroom_bytes
    if eta_steps < NEAR_STEPS or headroom < NEAR_RATIO * limit:
        return 0.0
    return VERY_FAR_SECONDS if _is_very_far(forecast) else FAR_SECONDS


def _is_very_far(forecast: MemoryForecast) -> bool:
    return (
        forecast.risk_ratio < VERY_FAR_RISK
        and forecast.eta_steps >= VERY_FAR_STEPS
        and forecast.headroom_bytes >= VERY_FAR_RATIO * forecast.limit_bytes
    )


def _are_very_far(forecasts: Mapping[str, MemoryForecast]) -> bool:
    return bool(forecasts) and all(map(_is_very_far, forecasts.values()))
