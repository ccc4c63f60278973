"""The forecast of one device's memory after a given step, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from .error_tail import ErrorTail
from .peak_model import PeakModel
from .series import Shape

# Extra prediction error for a batch larger than any observed: this share of its additional need.
EXTRAPOLATION_RATIO = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForecast:
    """A forecast. Its methods are cheap enough for the training thread and use no device.

    Attributes:
        step: The last step that it is based on.
        predicted_peak_bytes: Median of the next step's peak, for the largest micro-batch of the
            last 200 readings.
        headroom_bytes: Limit minus that peak and minus fragmented memory; infinite without a limit.
        risk_ratio: Probability that a peak within the next 50 steps exceeds the limit, averaged
            over the last 20 steps; at most 0.87, as the forecast itself may be wrong.
        eta_steps: Steps until the median peak exceeds the limit; infinite without growth.
        error_ratio: Median absolute error of the last predictions, relative to the observed peak.
        limit_bytes: The current limit, or what was reserved at the allocator's last retry; infinite
            without either.
        model: Predicts a peak from micro-batches and floor.
        floor_bytes: Memory in use before the next step.
        unusable_bytes: Memory lost to fragmentation in the next step.
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
    floor_bytes: float
    unusable_bytes: float
    tail: ErrorTail

    def predict_peak(self, shape: Shape) -> float:
        """Return the median peak of a step of this micro-batch, in bytes."""
        return self.model.predict((shape,), self.floor_bytes)

    def batch_risk(self, shape: Shape) -> float:
        """Return the probability that this micro-batch exceeds the limit if it runs next."""
        if self.limit_bytes == inf:
            return 0.0
        predicted = self.predict_peak(shape)
        margin = self.limit_bytes - self.unusable_bytes - predicted
        further = predicted - self.predicted_peak_bytes
        if further > 0:
            margin *= self.tail.width / (self.tail.width + EXTRAPOLATION_RATIO * further)
        return self.tail.exceedance(margin)
