"""Analyses the memory samples of steps: metrics, out-of-memory forecasts and leaks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from ...metrics.catalog import memory
from ...metrics.recorder import Recorder
from ...metrics.settings import MemorySettings
from ..common.fail_open import FailOpen
from ..common.gil_pauses import let_training_run
from ..instrumentation.raw_step import RawStep
from ..memory.forecast.forecast_service import MemoryForecasts
from ..memory.forecast.peak_readings import PeakPoint
from ..memory.leak_monitor import LeakMonitor
from ..memory.memory_metrics import MemoryMetrics
from ..memory.memory_reader import Readings
from ..memory.step_sample import StepMemorySample

# Maximum number of samples that are kept until the next publication.
MAX_SAMPLES = 256


class MemoryAnalysis:
    """Analyses the memory samples of one rank. `add_step` and `publish` run on the watch thread.

    Args:
        recorder: Receives the metrics.
        fail_open: Wraps the parts.
        settings: The settings; if memory is not monitored, only metrics are published.
        baseline_bytes: Bytes in use besides the engine, by device.
        devices: All devices that are read.
        has_step_peaks: Returns whether the peaks of a device belong to steps.
        rank: This rank.
        folder: Returns the run folder, or None until it exists.

    Attributes:
        metrics: Publishes samples.
        forecasts: Forecasts the peak of the next steps.
        leaks: Finds memory that grows.
    """

    def __init__(
        self,
        recorder: Recorder,
        fail_open: FailOpen,
        settings: MemorySettings,
        *,
        baseline_bytes: Mapping[str, float],
        devices: Collection[str],
        has_step_peaks: Callable[[str], bool],
        rank: int,
        folder: Callable[[], Path | None],
    ) -> None:
        self._is_enabled = settings.enabled
        self._has_step_peaks = has_step_peaks
        self.metrics = MemoryMetrics(recorder, baseline_bytes)
        self.forecasts = MemoryForecasts(recorder)
        self.leaks = LeakMonitor(recorder, rank, folder, trace_sites=settings.trace_leaks)
        if settings.enabled:
            recorder.start_counters((memory.OOMS,), device=devices)
        self._samples: deque[tuple[int, StepMemorySample]] = deque(maxlen=MAX_SAMPLES)
        self._is_replaced = False
        self._idle_readings: Readings | None = None
        tasks: dict[str, Callable[[], object]] = {"memory metrics": self._publish_samples}
        if settings.enabled:
            tasks["memory baseline"] = self._reset_if_replaced
            tasks["forecasts"] = self.forecasts.update
            tasks["leaks"] = self.leaks.check
        self._tasks = [fail_open.wrap(name, task) for name, task in tasks.items()]

    def add_step(self, step: RawStep) -> Mapping[str, float]:
        """Add the memory sample of a step, if the step has one, and return the risk by device."""
        sample = step.memory
        if sample is not None:
            self._samples.append((step.step, sample))
            if self._is_enabled:
                points = sample.points(step.step)
                self.leaks.add(points)
                if sample.trained_only:
                    self.forecasts.add(self._with_step_peaks(points, sample))
        return self.forecasts.risks

    def add_idle_readings(self, readings: Readings) -> None:
        """Add readings that were taken because no step has ended for a while."""
        self._idle_readings = readings

    def on_engine_replaced(self) -> None:
        """Discard the old engine's readings at the next publication."""
        self._is_replaced = True

    def publish(self) -> None:
        """Publish all samples since the last call. Called every second."""
        for task in self._tasks:
            let_training_run()
            task()

    def close(self) -> None:
        """Stop to look for leaks. Safe to call twice."""
        self.leaks.close()

    def _publish_samples(self) -> None:
        while self._samples:
            step, sample = self._samples.popleft()
            self.metrics.publish(sample)
            if sample.detail is not None:
                self.leaks.add_categories(step, self.metrics.categories)
        readings, self._idle_readings = self._idle_readings, None
        if readings is not None:
            self.metrics.publish_readings(readings)

    def _reset_if_replaced(self) -> None:
        if self._is_replaced:
            self._is_replaced = False
            self.forecasts.reset()
            self.leaks.reset()

    def _with_step_peaks(
        self, points: Mapping[str, PeakPoint], sample: StepMemorySample
    ) -> Mapping[str, PeakPoint]:
        """Remove the devices whose peaks cannot be attributed to steps."""
        return {
            device: point
            for device, point in points.items()
            if self._has_step_peaks(device) and "peak_allocated" in sample.readings[device]
        }
