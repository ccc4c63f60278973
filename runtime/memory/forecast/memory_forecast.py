"""What is to be expected of one device's memory, as known after some step."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from .error_tail import ErrorTail
from .peak_model import PeakModel
from .series import Shape

# By how much a prediction may be off for a batch larger than any seen: so much of what it needs
# more than those, in addition to the usual error.
EXTRAPOLATION_RATIO = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForecast:
    """A forecast; its methods are cheap enough for the training thread, and touch no device.

    Attributes:
        step: The last step it knows of.
        predicted_peak_bytes: Median of the next step's peak, for the largest micro-batch of the
            last 200 readings.
        headroom_bytes: What the limit leaves beyond that peak and beyond what fragmentation makes
            unusable; infinite without a limit.
        risk_ratio: Probability that a peak within the next 50 steps passes the limit, as thought on
            average of late; never over 0.87, as even what looks certain may not come.
        eta_steps: Steps until the median peak passes the limit; infinite if nothing grows.
        error_ratio: Median of the last errors of prediction, relative to the peak that came.
        limit_bytes: The limit as last known, or what could be reserved when the allocator was last
            refused more; infinite if there is none.
        model: Predicts a peak from its micro-batches and the floor.
        floor_bytes: The floor that the next step begins with.
        unusable_bytes: What fragmentation takes from the next step.
        tail: Errors of predicting the very next step.
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

    def predicted(self, shape: Shape) -> float:
        """Return the median peak of a step of this micro-batch, in bytes."""
        return self.model.predict((shape,), self.floor_bytes)

    def batch_risk(self, shape: Shape) -> float:
        """Return the probability that this micro-batch, about to run, passes the limit."""
        if self.limit_bytes == inf:
            return 0.0
        predicted = self.model.predict((shape,), self.floor_bytes)
        room = self.limit_bytes - self.unusable_bytes - predicted
        further = predicted - self.predicted_peak_bytes
        if further > 0:
            room *= self.tail.width / (self.tail.width + EXTRAPOLATION_RATIO * further)
        return self.tail.passed(room)
