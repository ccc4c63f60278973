"""Publishes memory readings and categories as metrics. A peak stays visible for a minute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from ...metrics.catalog import memory
from ...metrics.recorder import Recorder
from ..common.phase_timer import GENERATE_PHASE
from .categories import categories_at_peak
from .memory_reader import Reading, Readings
from .step_sample import StepMemorySample, fragmented_bytes

PEAK_SECONDS = 60.0  # at least as long as typical scrape intervals


class MemoryMetrics:
    """Publishes memory readings and categories as metrics, on the watch thread.

    Attributes:
        categories: Bytes by device and category at the peak of the last detailed sample.
    """

    def __init__(self, recorder: Recorder, baseline_bytes: Mapping[str, float]) -> None:
        """Create the metrics and publish the baseline.

        Args:
            recorder: Receives the metric values.
            baseline_bytes: Bytes in use besides the engine, by device.
        """
        self.categories: dict[str, Mapping[str, float]] = {}
        self._recorder = recorder
        self._baseline_bytes = baseline_bytes
        for device, size in baseline_bytes.items():
            recorder.set(memory.MEMORY_BASELINE, size, device)
        self._peaks: dict[tuple[str, str], SlidingMax] = {}

    def publish(self, sample: StepMemorySample) -> None:
        """Publish the sample at the end of a step."""
        with self._recorder.commit():
            self.publish_readings(sample.earlier_peaks)
            self.publish_readings(sample.readings)
            self._publish_generation(sample.generation_peaks)
            if sample.detail is not None:
                for device, states in sample.readings.items():
                    self._publish_detail(device, states, sample)

    def publish_readings(self, readings: Readings) -> None:
        """Publish readings that were not taken at the end of a step."""
        recorder = self._recorder
        for device, states in readings.items():
            for state, value in states.items():
                if state == "alloc_retries":
                    recorder.set(memory.ALLOC_RETRIES, value, device)
                elif state == "unusable":
                    recorder.set(memory.MEMORY_FRAGMENTATION, fragmented_bytes(states), device)
                elif state.startswith("peak_"):
                    peak = self._peaks.setdefault((device, state), SlidingMax()).add(value)
                    recorder.set(memory.MEMORY_PEAK, peak, device, state.removeprefix("peak_"))
                elif state == "limit":
                    recorder.set(memory.MEMORY_LIMIT, value, device)
                else:
                    recorder.set(memory.MEMORY_BYTES, value, device, state)

    def _publish_generation(self, peaks: Readings) -> None:
        """Publish the peaks of generation as a phase, and as a part of the highest use."""
        self.publish_readings(peaks)
        for device, states in peaks.items():
            if "peak_allocated" in states:
                peak = states["peak_allocated"]
                self._recorder.set(memory.MEMORY_PHASE_PEAK, peak, device, GENERATE_PHASE)

    def _publish_detail(self, device: str, states: Reading, sample: StepMemorySample) -> None:
        detail = sample.detail
        if detail is None or "allocated" not in states:
            return
        peaks = detail.phase_peaks.get(device, {})
        for phase, peak in peaks.items():
            self._recorder.set(memory.MEMORY_PHASE_PEAK, peak, device, phase)
        passes = [peaks[phase] for phase in ("forward", "backward") if phase in peaks]
        if not passes:
            return
        categories = categories_at_peak(
            detail.held_before.get(device, {}),
            detail.held_after.get(device, {}),
            between_steps_bytes=states["allocated"]
            - (detail.heap_free_bytes if device == "cpu" else 0),
            peak_bytes=max(passes),
            baseline_bytes=self._baseline_bytes.get(device, 0.0),
        )
        self.categories[device] = categories
        for category, size in categories.items():
            self._recorder.set(memory.MEMORY_CATEGORY_BYTES, size, device, category)


class SlidingMax:
    """Keeps the maximum value of the last minute, so that no scrape misses a peak.

    It stores the values that may still become the maximum, in descending order.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._values: deque[tuple[float, float]] = deque()

    def add(self, value: float) -> float:
        """Add a value and return the maximum of the last PEAK_SECONDS."""
        now = self._now()
        while self._values and self._values[-1][1] <= value:
            self._values.pop()
        self._values.append((now, value))
        while self._values[0][0] < now - PEAK_SECONDS:
            self._values.popleft()
        return self._values[0][1]
