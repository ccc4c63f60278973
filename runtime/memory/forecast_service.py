"""Forecasts of each device's memory while a run goes on: renewed, published, and acted on."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Mapping

from ...metrics.catalog import memory
from ...metrics.recorder import Recorder
from ...metrics.thresholds import OOM_RISK_HIGH
from ..common.units import format_bytes
from .forecast.forecaster import Forecaster
from .forecast.memory_forecast import MemoryForecast
from .forecast.series import PeakPoint, Shape
from .oom.evidence import Foresight

logger = logging.getLogger(__name__)

# An outlook takes a millisecond or two, and all our threads may take three a second: it is renewed
# each second only where the limit is near, by steps or by bytes.
FAR_SECONDS = 5.0
NEAR_STEPS, NEAR_RATIO = 500, 0.3
REARM_RISK = 0.3
# A script may catch the error and go on with such batches.
BATCH_ALARM_SECONDS = 60.0
# A batch of such a risk need not be judged again by the same outlook.
HARMLESS_RISK = 0.01
LAST_PEAKS = 20


class MemoryForecasts:
    """One forecaster per device. `judge` runs on the training thread, all else on the watch thread.

    Attributes:
        risks: The risk by device, as last worked out.
        outlooks: The outlook by device; replaced whole, so that any thread may read it.
        foreseen: By device the first step of the present alarm; None where there is none.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.risks: Mapping[str, float] = {}
        self.outlooks: Mapping[str, MemoryForecast] = {}
        self.foreseen: dict[str, int | None] = {}
        self._recorder = recorder
        self._forecasters: dict[str, Forecaster] = {}
        self._last: dict[str, deque[tuple[PeakPoint, Foresight]]] = {}
        self._renewal_due = 0.0
        self._stale = False
        self._judged: dict[str, float] = {}
        self._harmless: dict[Shape, dict[str, float]] = {}
        self._batch_risks: dict[str, float] = {}
        self._batch_alarm_due = 0.0

    def add(self, points: Mapping[str, PeakPoint]) -> None:
        """Take the readings at the end of a step, by device."""
        for device, point in points.items():
            self._forecasters.setdefault(device, Forecaster()).add(point)
            last = self._last.setdefault(device, deque(maxlen=LAST_PEAKS))
            last.append((point, self._foresight(device, point)))
            self._stale = True

    def begin_anew(self) -> None:
        """Forget what was read so far: the engine is another one, and needs another amount."""
        self._forecasters.clear()
        self.outlooks, self.risks = {}, {}
        self._harmless = {}

    def last_peaks(self, device: str) -> list[PeakPoint]:
        """Return the last readings of a device, the oldest first."""
        return [point for point, _ in list(self._last.get(device, ()))]

    def last_foresights(self, device: str) -> list[Foresight]:
        """Return what was thought of the last readings, the oldest first."""
        return [foresight for _, foresight in list(self._last.get(device, ()))]

    def predicted(self, device: str, shape: Shape) -> float | None:
        """Return the peak to expect with a micro-batch, in bytes; None where nothing tells."""
        outlook = self.outlooks.get(device)
        return None if outlook is None else outlook.predicted(shape)

    def judged(self, device: str) -> float | None:
        """Return the probability that the micro-batch under way does not fit, as it began."""
        return self._judged.get(device)

    def judge(self, shape: Shape) -> None:
        """Judge a micro-batch that begins, by the outlooks there are."""
        harmless = self._harmless
        if shape in harmless:  # most batches are alike
            self._judged = harmless[shape]
            return
        self._judged = judged = {}
        for device, outlook in self.outlooks.items():
            risk = judged[device] = outlook.batch_risk(shape)
            if risk > self._batch_risks.get(device, -1.0):
                self._batch_risks[device] = risk
            if risk >= OOM_RISK_HIGH:
                self._warn_of_batch(device, shape, outlook, risk)
        if max(judged.values(), default=1.0) < HARMLESS_RISK:
            harmless[shape] = judged

    def renew(self) -> None:
        """Work out and publish the outlooks anew, if that is due."""
        now = time.monotonic()
        if not self._stale or now < self._renewal_due:
            return
        self._stale = False
        found = {device: each.outlook() for device, each in self._forecasters.items()}
        self.outlooks = {device: outlook for device, outlook in found.items() if outlook}
        self._harmless = {}
        self.risks = {device: self._risk(device, each) for device, each in self.outlooks.items()}
        if not any(map(_is_near, self.outlooks.values())):
            self._renewal_due = now + FAR_SECONDS
        batch_risks, self._batch_risks = self._batch_risks, {}
        with self._recorder.commit():
            for device, outlook in self.outlooks.items():
                self._publish(device, outlook)
                self._recorder.set(memory.OOM_NEXT_BATCH_RISK, batch_risks.get(device, 0.0), device)
        for device, outlook in self.outlooks.items():
            self._warn(device, outlook)

    def _foresight(self, device: str, point: PeakPoint) -> Foresight:
        """Say what is thought of a reading by the outlook there was before it."""
        predictions = [self.predicted(device, shape) for shape in point.shapes]
        known = [predicted for predicted in predictions if predicted is not None]
        return Foresight(
            step=point.step,
            predicted_bytes=max(known, default=None),
            risk_ratio=self.risks.get(device),
        )

    def _risk(self, device: str, outlook: MemoryForecast) -> float:
        """Return the risk; a limit that was passed, as a budget can be, is none any more."""
        last, _ = self._last[device][-1]
        return 1.0 if last.peak_bytes > last.limit_bytes else outlook.risk_ratio

    def _publish(self, device: str, outlook: MemoryForecast) -> None:
        put = self._recorder
        put.set(memory.MEMORY_PREDICTED_PEAK, outlook.predicted_peak_bytes, device)
        put.set(memory.MEMORY_PREDICTION_ERROR, outlook.error_ratio, device)
        put.set(memory.OOM_RISK, self.risks[device], device)
        put.set(memory.OOM_ETA_STEPS, outlook.eta_steps, device)
        if math.isfinite(outlook.headroom_bytes):
            put.set(memory.MEMORY_HEADROOM, outlook.headroom_bytes, device)

    def _warn(self, device: str, outlook: MemoryForecast) -> None:
        """Say once that memory will run out, and not again before that was over."""
        risk = self.risks[device]
        if risk < REARM_RISK:
            self.foreseen[device] = None
        elif risk >= OOM_RISK_HIGH and self.foreseen.get(device) is None:
            self.foreseen[device] = outlook.step
            logger.warning(
                "memory of %s %s: the next peak is predicted at %s, the limit is %s%s. Use a "
                "smaller micro-batch, or more sharding or offload.",
                device,
                "has passed its limit"
                if risk == 1.0
                else f"is likely to run out within 50 steps ({100 * risk:.0f} %)",
                format_bytes(outlook.predicted_peak_bytes),
                format_bytes(outlook.limit_bytes),
                f"; about {outlook.eta_steps:.0f} steps are left"
                if 1 <= outlook.eta_steps < math.inf
                else "",
            )

    def _warn_of_batch(
        self, device: str, shape: Shape, outlook: MemoryForecast, risk: float
    ) -> None:
        """Say so at once, on the training thread: the kernel may kill this process next."""
        now = time.monotonic()
        if now < self._batch_alarm_due:
            return
        self._batch_alarm_due = now + BATCH_ALARM_SECONDS
        logger.warning(
            "this micro-batch (%d x %d) is likely not to fit into the memory of %s (%.0f %%): it "
            "needs about %s, the limit is %s. Split it, or limit the length.",
            shape.samples,
            shape.length,
            device,
            100 * risk,
            format_bytes(outlook.predicted(shape)),
            format_bytes(outlook.limit_bytes),
        )


def _is_near(outlook: MemoryForecast) -> bool:
    return (
        outlook.eta_steps < NEAR_STEPS or outlook.headroom_bytes < NEAR_RATIO * outlook.limit_bytes
    )
