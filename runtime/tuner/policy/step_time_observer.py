"""Observes windows between trials: their baseline time, shifts of speed, and metrics."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log, sqrt
from operator import mul
from statistics import median
from typing import Literal, Protocol

from ....metrics.catalog import communication
from ....metrics.recorder import Snapshot
from ....metrics.settings import CrossRankSettings
from .metrics_delta import MetricsDelta, metrics_between
from .policy_types import StepTime

MIN_STEPS = 3  # minimum number of steps in an interval of metrics
RECENT_STEPS = 20  # number of recent steps that are the baseline
# The log of an outlier differs from the log of the median by more than both limits.
OUTLIER_LOG_RATIO = log(1.3)
OUTLIER_DEVIATIONS = 5.0  # standard deviations
EXCHANGE_SECONDS = CrossRankSettings().interval_seconds
NORMAL = 1.4826  # standard deviations per median absolute deviation of a normal distribution

Shift = Literal["slower", "faster"]


class MetricsSource(Protocol):
    """Provides the metrics of this rank."""

    def snapshot(self) -> Snapshot:
        """Return a copy of the metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Usual step times before a trial.

    Attributes:
        seconds_per_sample: The median.
        noise: Standard deviation of the log of a step's time, assuming a normal distribution.
        recent: Seconds per sample of the latest consecutive steps, the last one last.
    """

    seconds_per_sample: float
    noise: float
    recent: Sequence[float]

    def is_outlier(self, seconds_per_sample: float) -> bool:
        """Whether a step's time is far from the median."""
        off = abs(log(seconds_per_sample / self.seconds_per_sample))
        return off > max(OUTLIER_LOG_RATIO, OUTLIER_DEVIATIONS * self.noise)


class StepTimeObserver:
    """Collects windows without a trial, and returns metrics once an interval is long enough.

    Args:
        metrics: Metrics of this rank.
        min_seconds: Minimum length of an interval.
        exchange_seconds: Time between two comparisons of the ranks.

    Attributes:
        shift: "slower" or "faster" if the speed of steps has shifted since `reset`, else None.
    """

    def __init__(
        self,
        metrics: MetricsSource,
        min_seconds: float,
        exchange_seconds: float = EXCHANGE_SECONDS,
    ) -> None:
        self._metrics, self._min_seconds = metrics, min_seconds
        self._snapshots = SnapshotSchedule(metrics, exchange_seconds)
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self.reset()

    @property
    def baseline(self) -> Baseline | None:
        """Times of recent steps; None before the first step."""
        if not self._recent:
            return None
        middle = median(self._recent)
        noise = NORMAL * median(abs(log(each / middle)) for each in self._recent)
        recent = list(self._recent)[len(self._recent) - self._num_consecutive :]
        return Baseline(seconds_per_sample=middle, noise=noise, recent=recent)

    def reset(self) -> None:
        """Forget all steps, as after a change."""
        self._recent.clear()
        self._num_consecutive = 0
        self.shift: Shift | None = None
        self._cusum = Cusum()
        self._start_interval()

    def _start_interval(self) -> None:
        self._before: Snapshot | None = None
        self._steps, self._seconds = 0, 0.0
        self._snapshots.restart()

    def interrupt(self) -> None:
        """Record that the following windows are not passed to `add`, e.g. those of a trial."""
        self._num_consecutive = 0

    def add(self, step: StepTime) -> MetricsDelta | None:
        """Add a window. Return the metrics of the interval if it is long enough, else None."""
        if not step.usable or not step.samples:
            self._num_consecutive = 0
            return None
        seconds_per_sample = step.seconds / step.samples
        self._recent.append(seconds_per_sample)
        self._num_consecutive = min(self._num_consecutive + 1, len(self._recent))
        shift = self._cusum.add(log(seconds_per_sample))
        if shift is not None:
            self.shift = shift
        if self._before is None:
            self._before = self._snapshots.next_snapshot(step.seconds)
            if self._before is not None:
                self._snapshots.restart()
            return None
        self._steps += 1
        self._seconds += step.seconds
        if self._steps < MIN_STEPS or self._seconds < self._min_seconds:
            return None
        before, after = self._before, self._snapshots.next_snapshot(step.seconds)
        if after is None:
            return None
        self._start_interval()
        return metrics_between(before, after)


class SnapshotSchedule:
    """Takes snapshots right after exposed communication was published.

    Exposed communication is published for several seconds of training at once. The increase between
    two publications belongs to exactly the training time between them, however short that time is.

    Args:
        metrics: Metrics of this rank.
        exchange_seconds: Time between two comparisons of the ranks.
    """

    CHECK_SECONDS = 0.5  # seconds of training between two checks of the metrics
    # Exchanges after which the ranks are taken not to be compared.
    MAX_EXCHANGES = 3
    # Factor by which the ranks may be compared more rarely than is set, as they are over a store
    # that only grows.
    MAX_DELAY = 4

    def __init__(self, metrics: MetricsSource, exchange_seconds: float = EXCHANGE_SECONDS) -> None:
        self._metrics = metrics
        self._max_seconds = self.MAX_EXCHANGES * max(exchange_seconds, EXCHANGE_SECONDS)
        self._longest_seconds = self.MAX_DELAY * self._max_seconds
        self._has_none = False  # whether nothing has been published in time, and nothing since
        self.restart()

    def restart(self) -> None:
        """Wait for the next publication."""
        self._reference: float | None = None
        self._waited = self._next_check = 0.0

    def next_snapshot(self, step_seconds: float) -> Snapshot | None:
        """Return a snapshot if something was published since the first call; else None.

        A job without communication has no publications to wait for.

        Args:
            step_seconds: Training time since the last call.
        """
        self._waited += step_seconds if self._next_check else 0.0
        if self._waited < self._next_check:
            return None
        self._next_check = self._waited + self.CHECK_SECONDS
        snapshot = self._metrics.snapshot()
        published = snapshot.total(communication.COMM_EXPOSED_SECONDS)
        if published:
            self._has_none = False
        if self._has_none or not snapshot.total(communication.COMM_SECONDS):
            return snapshot
        if self._reference is None:
            self._reference = published
        if published != self._reference:
            return snapshot
        if self._waited < self._max_seconds:
            return None
        self._has_none = not published
        if published:  # the ranks are compared, but more rarely
            self._max_seconds = min(2 * self._max_seconds, self._longest_seconds)
        return snapshot


class SnapshotIntervals:
    """Measures successive intervals of a run, from one publication to another.

    Args:
        metrics: Metrics of this rank.
        exchange_seconds: Time between two comparisons of the ranks.
        now: A monotonic clock, in seconds.

    Attributes:
        is_waiting: Whether the last call waited for a publication: it is to be repeated.
    """

    def __init__(
        self,
        metrics: MetricsSource,
        exchange_seconds: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now, self._polled_at = now, now()
        self._snapshots = SnapshotSchedule(metrics, exchange_seconds)
        self._before: Snapshot | None = None
        self.is_waiting = False

    def start(self) -> None:
        """Begin an interval."""
        self._before = self._next_snapshot()

    def end(self) -> MetricsDelta | None:
        """Return what the metrics did in the interval, and begin the next one."""
        before, after = self._before, self._next_snapshot()
        if after is None:
            return None
        self._before = after
        return None if before is None else metrics_between(before, after)

    def _next_snapshot(self) -> Snapshot | None:
        seconds, self._polled_at = self._now() - self._polled_at, self._now()
        snapshot = self._snapshots.next_snapshot(seconds)
        self.is_waiting = snapshot is None
        if snapshot is not None:
            self._snapshots.restart()
        return snapshot


# The constants of the detector were chosen on simulated steps (tests/bench/tuner/simulated_shifts).
# A well-known baseline matters more than the deviation of one step. With a baseline of 20 steps,
# there are ten times as many false alarms as with a baseline that continues to grow. The noise of
# the simulated steps is correlated from step to step. Such noise sums up about six times as fast as
# independent noise.
MIN_BASELINE_STEPS = 20
MAX_BASELINE_STEPS = 200
# All deviations and sums below refer to the log of a step's time.
ALLOWANCE = 0.025  # half the smallest shift to detect; it is subtracted from each deviation
ALARM = 0.4  # the sum of deviations that is reported as a shift
# The sum of deviations above which steps are not added to the baseline yet, so that it does not
# include the shift itself. They are added if the sum falls again: a baseline without its slow steps
# would be too low.
SUSPICION = 0.1
# Standard deviation of the simulated steps (tests/support/fakes/noisy_steps). A noisier machine
# needs two sums. The deviations scaled down to this noise show large shifts early, but not those
# smaller than the noise. The unscaled deviations show these later; what noise adds to their sum
# grows with the variance. A shift of 5 % is detected after about 18 steps with noise of 2 %,
# 65 with 4 %, 165 with 6 % and 400 with 10 %, with about one false alarm in 10,000 steps. If some
# steps take longer than others, as every fourth one that updates averages of the weights, the mean
# is not the median. Deviations from the median would then add up without a shift.
USUAL_NOISE = 0.02
# Variance that the slow steps add, in the simulated steps: 2 % of them take 1.3 times as long or
# more. Slow steps come independently of each other, so more of them count as noise with less weight
# than noise that is correlated.
USUAL_SLOW_VARIANCE = 0.0005
SLOW_WEIGHT = 1 / 6
MAX_NOISE = 0.15  # above it, the baseline is too uncertain for the sum of unscaled deviations
MAX_DEVIATION = 0.13  # limit for the scaled deviation of one step, so that spikes are not a shift


class Cusum:
    """Detects lasting shifts of speed: cumulative sums of deviations from a baseline mean."""

    def __init__(self) -> None:
        self._baseline: list[float] = []  # sorted
        self._suspicious: list[float] = []  # recent steps that the baseline may get
        self._scale, self._limit = 1.0, MAX_DEVIATION
        self._median = self._mean = 0.0  # the mean is that of the deviations from the median
        self._scaled, self._unscaled = _Sums(), _Sums()

    def add(self, log_seconds: float) -> Shift | None:
        """Add the log of a step's time. Return the shift if one is detected, else None."""
        if len(self._baseline) >= MIN_BASELINE_STEPS:
            deviation = min(max(log_seconds - self._median, -self._limit), self._limit)
            deviation -= self._mean
            self._scaled.add(deviation * self._scale)
            # Each with the weight of its own time. After slow first steps, the mean is too high
            # until the scale grows.
            self._unscaled.add(deviation, weight=self._scale**2)
        if self._scale <= USUAL_NOISE / MAX_NOISE:
            self._unscaled = _Sums()
        slower = max(self._scaled.slower, self._unscaled.slower)
        faster = max(self._scaled.faster, self._unscaled.faster)
        if max(slower, faster) >= ALARM:
            self._baseline.clear()
            self._suspicious.clear()
            self._scaled, self._unscaled = _Sums(), _Sums()
            return "slower" if slower >= faster else "faster"
        if len(self._baseline) + len(self._suspicious) < MAX_BASELINE_STEPS:
            self._suspicious.append(log_seconds)
        if self._suspicious and max(self._scaled.slower, self._scaled.faster) < SUSPICION:
            for each in self._suspicious:
                insort(self._baseline, each)
            self._suspicious.clear()
            # Not only once: a spread of 20 steps is a third too high or too low by chance.
            if len(self._baseline) >= MIN_BASELINE_STEPS:
                self._measure_baseline()
        return None

    def _measure_baseline(self) -> None:
        """Set the median and the mean of the baseline, and the scale by its noise.

        The training thread calls this in each step until the baseline is complete.
        """
        num, spread = len(self._baseline), self._spread
        self._median = self._baseline[num // 2]
        # Slow steps do not raise the limit: scaled down, each would still add as much.
        self._limit = MAX_DEVIATION * max(1.0, spread / USUAL_NOISE)
        low, high = self._median - self._limit, self._median + self._limit
        first, last = bisect_left(self._baseline, low), bisect_right(self._baseline, high)
        within = [each - self._median for each in self._baseline[first:last]]
        self._mean = (sum(within) + (num - last - first) * self._limit) / num
        squares = sum(map(mul, within, within)) + (num - last + first) * self._limit**2
        slow_variance = squares / num - self._mean**2 - spread**2 - USUAL_SLOW_VARIANCE
        variance = max(spread, USUAL_NOISE) ** 2 + SLOW_WEIGHT * max(0.0, slow_variance)
        self._scale = USUAL_NOISE / sqrt(variance)

    @property
    def _spread(self) -> float:
        """Half the range of the middle 68 % of the baseline: one standard deviation, if normal."""
        num = len(self._baseline)
        return (self._baseline[num * 84 // 100] - self._baseline[num * 16 // 100]) / 2


class _Sums:
    """Sums of the deviations in both directions, each less the allowance, and at least 0."""

    def __init__(self) -> None:
        self.slower = self.faster = 0.0

    def add(self, deviation: float, weight: float = 1.0) -> None:
        self.slower = max(0.0, self.slower + weight * (deviation - ALLOWANCE))
        self.faster = max(0.0, self.faster - weight * (deviation + ALLOWANCE))
