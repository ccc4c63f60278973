"""Computes the figures of this rank that rank 0 summarizes over all ranks.

Ratios cover whole steps: those between two readings at which the number of steps had changed, at
least a minute apart if the run is old enough.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...metrics.catalog import across_ranks, communication, devices, memory, overhead, training
from ...metrics.catalog.labels import NON_TRAINING_PHASES, PHASES
from ...metrics.catalog.spec import MetricSpec
from ...metrics.recorder import Recorder, Snapshot

# The figures of a rank, in the order of `across_ranks.STATISTICS`, then the last window of losses
# and their hash; NaN if a figure is unknown.
Figures = npt.NDArray[np.float32]
NUM_FIGURES = len(across_ranks.STATISTICS) + 2
LOSS_WINDOW, LOSS_HASH = NUM_FIGURES - 2, NUM_FIGURES - 1

PERIOD_SECONDS = 60.0
# Figures about steps are left out if the last step is older than this, and than three steps.
MAX_AGE_SECONDS = 60.0
MAX_AGE_STEPS = 3
# One reading per exchange of at least 0.1 s would fill a minute with this many.
MAX_READINGS = 600
_HOST = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """The counters of this rank at a moment, summed over labels; seconds unless stated."""

    at: float  # by the monotonic clock
    last_step_at: float | None  # by the same clock
    steps: float
    samples: float
    flops: float
    training: float
    generate: float
    data: float
    comm: float
    untimed: float  # number of calls without a duration
    coverage: float  # of the last step: recorded calls over counted ones
    exposed: float
    wait: float


class RankFigures:
    """Reads this rank's figures from its metrics, on the comparison thread.

    Args:
        recorder: Holds the metrics.
        now: A monotonic clock, in seconds.
        unix_now: The system clock, in seconds, which may be set during the run.

    Attributes:
        read_losses: Returns the last window of losses and their hash; NaN if they are unknown.
    """

    def __init__(
        self,
        recorder: Recorder,
        now: Callable[[], float] = time.monotonic,
        unix_now: Callable[[], float] = time.time,
    ) -> None:
        self.read_losses: Callable[[], tuple[float, float]] = lambda: (math.nan, math.nan)
        self._recorder = recorder
        self._now, self._unix_now = now, unix_now
        # Only readings at which there was a new step.
        self._readings: deque[_Reading] = deque(maxlen=MAX_READINGS)
        self._utilization: deque[tuple[float, float]] = deque(maxlen=MAX_READINGS)

    def read(self) -> Figures:
        """Return the figures as they are now."""
        snapshot, now = self._recorder.snapshot(), self._now()
        reading = _reading(snapshot, now, self._last_step_at(snapshot, now))
        if not self._readings or reading.steps != self._readings[-1].steps:
            self._readings.append(reading)
        device = _training_device(snapshot)
        known = {
            "step_duration": snapshot.value(training.STEP_DURATION_QUANTILE, "0.5"),
            "oom_risk": max(snapshot.values.get(memory.OOM_RISK, {}).values(), default=None),
            **self._of_steps(now, _of_device(snapshot, training.PEAK_FLOPS, device)),
            **self._of_device(snapshot, now, device),
        }
        figures = [*(known.get(name) for name in across_ranks.STATISTICS), *self.read_losses()]
        return np.array([math.nan if each is None else each for each in figures], np.float32)

    def _last_step_at(self, snapshot: Snapshot, now: float) -> float | None:
        """Return when the last step ended, by the monotonic clock; None before the first step.

        If the system clock was set after this step, the result may be any time since the last
        reading.
        """
        unix_seconds = snapshot.value(training.LAST_STEP_TIMESTAMP)
        if unix_seconds is None:
            return None
        ended_at = now - (self._unix_now() - unix_seconds)
        earliest = self._readings[-1].last_step_at if self._readings else None
        return min(now, ended_at if earliest is None else max(earliest, ended_at))

    def _of_steps(self, now: float, peak_flops: float | None) -> dict[str, float | None]:
        """Return the figures about the steps of the last minute; none while there are no steps."""
        interval = self._interval()
        if interval is None:
            return {}
        before, after = interval
        step_seconds = (after.at - before.at) / (after.steps - before.steps)
        if now - after.at > max(MAX_AGE_SECONDS, MAX_AGE_STEPS * step_seconds):
            return {}
        seconds = after.training - before.training
        passes = seconds - (after.generate - before.generate)  # FLOPs of generation do not count
        exposed: float | None = after.exposed - before.exposed
        wait: float | None = after.wait - before.wait
        has_calls = after.comm > before.comm or after.untimed > before.untimed or after.coverage < 1
        if not exposed and has_calls:
            exposed = wait = None  # not compared yet, or without durations, such as calls of DDP
        elapsed = None
        if before.last_step_at is not None and after.last_step_at is not None:
            elapsed = after.last_step_at - before.last_step_at
        return {
            "exposed_comm": _ratio(exposed, seconds),
            "comm_wait": _ratio(wait, seconds),
            "data": _ratio(after.data - before.data, seconds),
            "mfu": _ratio(_ratio((after.flops - before.flops) or None, passes), peak_flops),
            "samples_per_second": _ratio((after.samples - before.samples) or None, elapsed),
        }

    def _interval(self) -> tuple[_Reading, _Reading] | None:
        """Return two readings at least a minute apart if there are any, else the first and last."""
        readings = self._readings
        if len(readings) < 2:
            return None
        if len(readings) > 2 and readings[0].last_step_at is None:
            readings.popleft()  # before the first step: nobody knows when its samples began
        after = readings[-1]
        while readings[1].at <= after.at - PERIOD_SECONDS:
            readings.popleft()
        return readings[0], after

    def _of_device(
        self, snapshot: Snapshot, now: float, device: str | None
    ) -> dict[str, float | None]:
        utilization = _of_device(snapshot, devices.DEVICE_UTILIZATION, device)
        if utilization is not None:
            self._utilization.append((now, utilization))
        while self._utilization and self._utilization[0][0] < now - PERIOD_SECONDS:
            self._utilization.popleft()
        recent = [value for _, value in self._utilization]
        peak = None
        if device is not None:
            peak = snapshot.value(memory.MEMORY_PEAK, device, "allocated")
        return {
            "memory_peak": _ratio(peak, _of_device(snapshot, memory.MEMORY_LIMIT, device)),
            "device_utilization": _ratio(sum(recent), len(recent)),
            "device_temperature": _of_device(snapshot, devices.DEVICE_TEMPERATURE, device),
        }


def _reading(snapshot: Snapshot, now: float, last_step_at: float | None) -> _Reading:
    phases = {phase: snapshot.value(training.PHASE_SECONDS, phase) or 0.0 for phase in PHASES}
    coverage = snapshot.value(communication.COMM_COVERAGE_RATIO)
    return _Reading(
        at=now,
        last_step_at=last_step_at,
        steps=snapshot.total(training.STEPS),
        samples=snapshot.total(training.SAMPLES),
        flops=snapshot.total(training.FLOPS),
        training=sum(spent for phase, spent in phases.items() if phase not in NON_TRAINING_PHASES),
        generate=phases["generate"],
        data=phases["data"],
        comm=snapshot.total(communication.COMM_UNION_SECONDS),
        untimed=snapshot.value(overhead.DROPPED_RECORDS, "timing") or 0.0,
        coverage=1.0 if coverage is None else coverage,
        exposed=snapshot.total(communication.COMM_EXPOSED_SECONDS),
        wait=snapshot.total(communication.COMM_WAIT_SECONDS),
    )


def _training_device(snapshot: Snapshot) -> str | None:
    """Return the device of this rank: its GPU if it has one, else the host."""
    names = sorted(
        {labels[0] for labels in snapshot.values.get(memory.MEMORY_LIMIT, {})}
        | {labels[0] for labels in snapshot.values.get(devices.DEVICE_UTILIZATION, {})}
    )
    return next((name for name in names if name != _HOST), _HOST if names else None)


def _of_device(snapshot: Snapshot, spec: MetricSpec, device: str | None) -> float | None:
    return None if device is None else snapshot.value(spec, device)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole and part >= 0 < whole else None
