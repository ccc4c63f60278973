"""Watches steps between trials: what they say of the job, and whether their speed has shifted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from statistics import median
from typing import Literal

from ....metrics.snapshot import Snapshot
from .drift import Cusum
from .metrics_delta import MetricsDelta, metrics_between
from .types import StepTime

LEAST_STEPS = 3
RECENT_STEPS = 20
FAR, CLEAR_OF_NOISE = log(1.3), 5.0  # of a step's time, in logs; and in standard deviations
NORMAL = 1.4826  # of a normal distribution, standard deviations in a median deviation


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What steps took before something was tried.

    Attributes:
        seconds_per_sample: The median.
        noise: Standard deviation of its log, as if it were normal.
        lead: Of the last steps in a row, the last one last.
    """

    seconds_per_sample: float
    noise: float
    lead: Sequence[float]

    def is_far_from(self, seconds_per_sample: float) -> bool:
        """Whether a step stands out from these."""
        off = abs(log(seconds_per_sample / self.seconds_per_sample))
        return off > max(FAR, CLEAR_OF_NOISE * self.noise)


class StepTimeObserver:
    """Takes each window; gives a reading of the metrics once a stretch is long enough.

    Args:
        snapshot: Copies this rank's metrics.
        seconds: Of a stretch, at least.

    Attributes:
        shift: Whether the job has become "slower" or "faster" since `begin`; None while it has not.
    """

    def __init__(self, snapshot: Callable[[], Snapshot], seconds: float) -> None:
        self._snapshot, self._least_seconds = snapshot, seconds
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self.begin()

    @property
    def baseline(self) -> Baseline | None:
        """What recent steps took; None before the first."""
        if not self._recent:
            return None
        middle = median(self._recent)
        noise = NORMAL * median(abs(log(each / middle)) for each in self._recent)
        lead = list(self._recent)[len(self._recent) - self._num_in_a_row :]
        return Baseline(seconds_per_sample=middle, noise=noise, lead=lead)

    def begin(self) -> None:
        """Begin anew, as after a change."""
        self._recent.clear()
        self._num_in_a_row = 0
        self.shift: Literal["slower", "faster"] | None = None
        self._cusum = Cusum()
        self.begin_stretch()

    def interrupted(self) -> None:
        """Take it that other windows come between, which are not told here."""
        self._num_in_a_row = 0

    def begin_stretch(self) -> None:
        """Begin another stretch; the speed is still compared with what it was before."""
        self._before: Snapshot | None = None
        self._steps, self._seconds = 0, 0.0

    def add(self, step: StepTime) -> MetricsDelta | None:
        """Take a window; return what the metrics say of the stretch, once it is long enough."""
        if not step.usable or not step.samples:
            self._num_in_a_row = 0
            return None
        seconds_per_sample = step.seconds / step.samples
        self._recent.append(seconds_per_sample)
        self._num_in_a_row = min(self._num_in_a_row + 1, len(self._recent))
        shift = self._cusum.add(log(seconds_per_sample))
        if shift is not None:
            self.shift = shift
        if self._before is None:
            self._before = self._snapshot()
            return None
        self._steps += 1
        self._seconds += step.seconds
        if self._steps < LEAST_STEPS or self._seconds < self._least_seconds:
            return None
        before, after = self._before, self._snapshot()
        self.begin_stretch()
        return metrics_between(before, after)
