"""Recent memory peaks of this rank, from the watch's step records."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from ...metrics.step_record import StepRecord
from .oom_recovery.sizing import MemoryMeasurements, PeakSample, needs_guard

MAX_PEAKS = 200


class PeakHistory:
    """Peaks of the last steps, recorded on the watch thread; empty where nothing is watched.

    Args:
        watch: The watch on the engine.
        device: The device that is trained on, such as "cuda:0".
    """

    def __init__(self, watch: Any, device: str) -> None:
        self._device = device
        self._peaks: deque[PeakSample] = deque(maxlen=MAX_PEAKS)
        self._limit_bytes: float | None = None
        self._lock = threading.Lock()
        watch.subscribe(self._record)

    @property
    def is_low(self) -> bool:
        """Whether the last peak came near the limit."""
        if not self._peaks or self._limit_bytes is None:
            return False
        headroom = self._limit_bytes - self._peaks[-1].peak_bytes
        return needs_guard(is_changed=False, headroom_bytes=headroom, limit_bytes=self._limit_bytes)

    def measured(self) -> MemoryMeasurements:
        """Return the peaks of the last steps, and the limit."""
        with self._lock:
            return MemoryMeasurements(peaks=tuple(self._peaks), limit_bytes=self._limit_bytes)

    def _record(self, record: StepRecord) -> None:
        states = record.memory_bytes.get(self._device, {})
        peak_bytes = states.get("peak_allocated")
        if peak_bytes is None or not record.micro_batch_shapes:
            return
        self._limit_bytes = states.get("limit", self._limit_bytes)
        samples, length = max(record.micro_batch_shapes, key=lambda shape: shape[0] * shape[1])
        with self._lock:
            self._peaks.append(PeakSample(samples=samples, length=length, peak_bytes=peak_bytes))
