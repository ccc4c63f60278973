"""From readings of memory to metric values. Keeps recent peaks, and the last look at categories."""

from __future__ import annotations

from collections.abc import Mapping

from ...metrics.catalog import memory
from ...metrics.recorder import Recorder
from .category_sums import categories_at_peak
from .memory_reader import Reading, Readings
from .sliding_max import SlidingMax
from .step_sample import StepMemorySample


class MemoryMetrics:
    """Publishes what was read. Used on the watch thread alone.

    Attributes:
        categories: Bytes by device and category at the peak of the step last looked at.
    """

    def __init__(self, recorder: Recorder, baseline_bytes: Mapping[str, float]) -> None:
        """Describe the figures; `baseline_bytes` is by device what was in use beside the engine."""
        self.categories: dict[str, Mapping[str, float]] = {}
        self._recorder = recorder
        self._baseline_bytes = baseline_bytes
        for device, size in baseline_bytes.items():
            recorder.set(memory.MEMORY_BASELINE, size, device)
        self._peaks: dict[tuple[str, str], SlidingMax] = {}

    def publish(self, reading: StepMemorySample) -> None:
        """Publish the end of a step."""
        with self._recorder.commit():
            self.publish_states(reading.readings)
            if reading.look is not None:
                for device, states in reading.readings.items():
                    self._publish_look(device, states, reading)

    def publish_states(self, readings: Readings) -> None:
        """Publish what was read at any time."""
        put = self._recorder
        for device, states in readings.items():
            for state, value in states.items():
                if state == "alloc_retries":
                    put.set(memory.ALLOC_RETRIES, value, device)
                elif state == "unusable":
                    put.set(memory.MEMORY_FRAGMENTATION, value, device)
                elif state.startswith("peak_"):
                    peak = self._peaks.setdefault((device, state), SlidingMax()).add(value)
                    put.set(memory.MEMORY_BYTES, peak, device, state)
                else:
                    put.set(memory.MEMORY_BYTES, value, device, state)

    def _publish_look(self, device: str, states: Reading, reading: StepMemorySample) -> None:
        look = reading.look
        if look is None or "allocated" not in states:
            return
        peaks = look.phase_peaks.get(device, {})
        for phase, peak in peaks.items():
            self._recorder.set(memory.MEMORY_PHASE_PEAK, peak, device, phase)
        passes = [peaks[phase] for phase in ("forward", "backward") if phase in peaks]
        if not passes:
            return
        categories = categories_at_peak(
            look.held_before.get(device, {}),
            look.held_after.get(device, {}),
            floor_bytes=states["allocated"] - (look.heap_free_bytes if device == "cpu" else 0),
            peak_bytes=max(passes),
            baseline_bytes=self._baseline_bytes.get(device, 0.0),
        )
        self.categories[device] = categories
        for category, size in categories.items():
            self._recorder.set(memory.MEMORY_CATEGORY_BYTES, size, device, category)
