"""Keeps the steps of the last hours in bounded memory, coarser the older they are.

A point covers all steps of a second, or a single step if it takes longer. Once RECENT_POINTS points
are newer, points are merged to COARSE_SECONDS each, of which COARSE_POINTS are kept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import islice

from ...metrics.catalog.labels import CAUSE, NON_TRAINING_PHASES, PHASES
from ...metrics.step_record import StepRecord, exposed_in_training

# Length of a new point, and the number of such points: a quarter of an hour.
FINE_SECONDS = 1.0
RECENT_POINTS = 900
# Length of an older point, and the number of such points: six hours.
COARSE_SECONDS = 12.0
COARSE_POINTS = 1800

CAUSES = CAUSE.values


@dataclass(slots=True, kw_only=True)
class Point:
    """The steps of a period of one rank. Seconds are sums over the steps.

    Attributes:
        step: The last step.
        ended_at: Unix time at which the last step ended.
        seconds: Wall time of the steps, which no change of the system's clock falsifies.
        steps: The number of steps.
        phase_seconds: The seconds of all steps in each of PHASES.
        timed_seconds: Training time of the steps whose exposed time is known.
        exposed_seconds: Exposed communication of those steps, in training.
        loss_sum: The sum of the losses of `loss_steps` steps. The others have none.
        nonfinite_losses: The number of steps whose loss is not a finite number.
        samples: The samples of the steps; 0 if unknown. So are the tokens.
        peak_bytes: The highest memory use by device.
        cause_seconds: Exposed seconds by cause, in the order of CAUSES, that were published since
            the point before. They concern steps of some seconds ago.
    """

    step: int
    ended_at: float
    seconds: float
    steps: int
    phase_seconds: list[float]
    timed_seconds: float
    exposed_seconds: float
    loss_sum: float
    loss_steps: int
    nonfinite_losses: int
    samples: int
    tokens: int
    peak_bytes: dict[str, float]
    cause_seconds: list[float] = field(default_factory=lambda: [0.0] * len(CAUSES))

    def add_step(
        self,
        *,
        step: int,
        ended_at: float,
        seconds: float,
        phase_seconds: Mapping[str, float],
        exposed_seconds: float | None,
        exposed_phase_seconds: Mapping[str, float],
        loss: float | None,
        nonfinite_loss: bool,
        samples: int | None,
        tokens: int | None,
        memory_bytes: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Add a step, given the values of its record. No other thread may know this point yet."""
        excluded = sum(phase_seconds.get(phase, 0.0) for phase in NON_TRAINING_PHASES)
        exposed = exposed_in_training(exposed_seconds, exposed_phase_seconds)
        self.step, self.ended_at = step, ended_at
        self.seconds += seconds
        self.steps += 1
        for phase, spent in phase_seconds.items():
            if phase in PHASE_INDEX:  # a log of another version may have others
                self.phase_seconds[PHASE_INDEX[phase]] += spent
        if exposed is not None:
            self.timed_seconds += seconds - excluded
            self.exposed_seconds += exposed
        if loss is not None:
            self.loss_sum += loss
            self.loss_steps += 1
        self.nonfinite_losses += nonfinite_loss
        self.samples += samples or 0
        self.tokens += tokens or 0
        for device, states in memory_bytes.items():
            if "peak_allocated" in states:
                peak = max(self.peak_bytes.get(device, 0.0), states["peak_allocated"])
                self.peak_bytes[device] = peak

    def merge(self, later: Point) -> None:
        """Add the steps of a later point. Lists and mappings are replaced, not changed."""
        self.step, self.ended_at = later.step, later.ended_at
        self.seconds += later.seconds
        self.steps += later.steps
        self.phase_seconds = _sums(self.phase_seconds, later.phase_seconds)
        self.timed_seconds += later.timed_seconds
        self.exposed_seconds += later.exposed_seconds
        self.loss_sum += later.loss_sum
        self.loss_steps += later.loss_steps
        self.nonfinite_losses += later.nonfinite_losses
        self.samples += later.samples
        self.tokens += later.tokens
        self.peak_bytes = {
            device: max(peaks.get(device, 0.0) for peaks in (self.peak_bytes, later.peak_bytes))
            for device in {**self.peak_bytes, **later.peak_bytes}
        }
        self.cause_seconds = _sums(self.cause_seconds, later.cause_seconds)

    @property
    def started_at(self) -> float:
        """Unix time at which the first step began."""
        return self.ended_at - self.seconds

    @property
    def training_seconds(self) -> float:
        """Wall time of the steps in seconds, without evaluation and checkpoints."""
        return sum(self.phase_seconds) - sum(self.phase_seconds[each] for each in _NOT_TRAINING)


PHASE_INDEX = {phase: index for index, phase in enumerate(PHASES)}
_NOT_TRAINING = tuple(PHASE_INDEX[phase] for phase in NON_TRAINING_PHASES)


def empty_point() -> Point:
    """Return a point without steps."""
    return Point(
        step=0,
        ended_at=0.0,
        seconds=0.0,
        steps=0,
        phase_seconds=[0.0] * len(PHASES),
        timed_seconds=0.0,
        exposed_seconds=0.0,
        loss_sum=0.0,
        loss_steps=0,
        nonfinite_losses=0,
        samples=0,
        tokens=0,
        peak_bytes={},
    )


class StepHistory:
    """The points of the last hours. Steps are added on one thread and read on another.

    Args:
        cause_seconds: Returns the exposed seconds of the run so far, in the order of CAUSES.

    Attributes:
        nonfinite_at: Unix seconds of the last step whose loss was not finite; None without one.
    """

    def __init__(self, cause_seconds: Callable[[], Sequence[float]]) -> None:
        self._cause_seconds = cause_seconds
        self._counted = [0.0] * len(CAUSES)
        self._open: Point | None = None
        self._recent: deque[Point] = deque()
        self._coarse: deque[Point] = deque(maxlen=COARSE_POINTS)
        self._num_closed = 0
        self._last_ended_at = self._clock_shift = 0.0
        self._lock = threading.Lock()
        self.nonfinite_at: float | None = None

    @property
    def num_closed(self) -> int:
        """The number of points so far, which is the number of the next point."""
        return self._num_closed

    def add(self, record: StepRecord) -> None:
        """Add a step."""
        ended_at = record.ended_at_unix_seconds + self._clock_shift
        if ended_at <= self._last_ended_at:  # the clock was set back; charts need rising times
            self._clock_shift += self._last_ended_at + record.seconds - ended_at
            ended_at = self._last_ended_at + record.seconds
        self._last_ended_at = ended_at
        if record.nonfinite_loss:
            self.nonfinite_at = record.ended_at_unix_seconds
        if self._open is None:
            self._open = empty_point()
        self._open.add_step(
            step=record.step,
            ended_at=ended_at,
            seconds=record.seconds,
            phase_seconds=record.phase_seconds,
            exposed_seconds=record.comm_exposed_seconds,
            exposed_phase_seconds=record.comm_exposed_phase_seconds,
            loss=record.loss,
            nonfinite_loss=record.nonfinite_loss,
            samples=record.samples,
            tokens=record.tokens,
            memory_bytes=record.memory_bytes,
        )
        if self._open.seconds >= FINE_SECONDS:
            self._close(self._open)

    def points(self) -> list[Point]:
        """Return all points, from the oldest on."""
        with self._lock:
            return [*self._coarse, *self._recent]

    def since(self, number: int) -> list[Point] | None:
        """Return the points from a number on, or None if some of them have been merged."""
        with self._lock:
            missing = self._num_closed - number
            if not 0 <= missing <= len(self._recent):
                return None
            return list(islice(self._recent, len(self._recent) - missing, None))

    def last_seconds(self, seconds: float, min_steps: int) -> Point | None:
        """Return the steps of the last seconds as one point, but at least `min_steps` steps.

        The end of the last step counts as now. None if there is no point.
        """
        total: Point | None = None
        with self._lock:
            for point in reversed(self._recent):
                if total is not None:
                    is_old = point.ended_at <= self._recent[-1].ended_at - seconds
                    if is_old and total.steps >= min_steps:
                        break
                    total = _merged(point, total)
                else:
                    total = _merged(point)
        return total

    def _close(self, point: Point) -> None:
        self._open = None
        counted = list(self._cause_seconds())
        point.cause_seconds = [now - then for now, then in zip(counted, self._counted, strict=True)]
        self._counted = counted
        with self._lock:
            self._recent.append(point)
            self._num_closed += 1
            if len(self._recent) > RECENT_POINTS:
                self._make_coarse(self._recent.popleft())

    def _make_coarse(self, point: Point) -> None:
        last = self._coarse[-1] if self._coarse else None
        if last is not None and last.seconds + point.seconds <= COARSE_SECONDS:
            self._coarse[-1] = _merged(last, point)
        else:
            self._coarse.append(point)


def _merged(first: Point, *later: Point) -> Point:
    """Return a new point, because another thread may read the first one."""
    merged = copy(first)
    for point in later:
        merged.merge(point)
    return merged


def _sums(left: Iterable[float], right: Iterable[float]) -> list[float]:
    return [one + other for one, other in zip(left, right, strict=True)]


def columns(points: Sequence[Point]) -> Mapping[str, object]:
    """Return points as columns, for the charts of the page. An unknown value is None.

    Step times are means per step, in seconds. Rates are per second of wall time.
    """
    devices = sorted({device for point in points for device in point.peak_bytes})
    return {
        "step": [point.step for point in points],
        "steps": [point.steps for point in points],
        "ended_at": [round(point.ended_at, 3) for point in points],
        "phases": {
            phase: [_rounded(point.phase_seconds[index] / point.steps) for point in points]
            for index, phase in enumerate(PHASES)
            if any(point.phase_seconds[index] for point in points)
        },
        "exposed_ratio": [_ratio(p.exposed_seconds, p.timed_seconds) for p in points],
        "loss": [_ratio(point.loss_sum, point.loss_steps) for point in points],
        "samples_per_second": [_ratio(p.samples, p.seconds) if p.samples else None for p in points],
        "tokens_per_second": [_ratio(p.tokens, p.seconds) if p.tokens else None for p in points],
        "peak_bytes": {
            device: [point.peak_bytes.get(device) for point in points] for device in devices
        },
    }


def _ratio(part: float, whole: float) -> float | None:
    return _rounded(part / whole) if whole > 0 else None


def _rounded(value: float) -> float:
    """Return a value with six significant digits: half the bytes, and more than a chart shows."""
    return float(f"{value:.6g}")
