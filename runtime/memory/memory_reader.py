"""Reads all memory probes of this rank, and keeps peaks by step and by phase."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

Reading = Mapping[str, float]
Readings = Mapping[str, Reading]

_PEAKS = ("peak_allocated", "peak_reserved")


class MemoryReader:
    """Reads all probes at once, so that a reading by one caller hides no peak from another.

    The peak of a probe covers the time since the last reading by any caller. The reader therefore
    keeps the maximum since the last step, and the maximum since the last change of phase. During a
    generation, the first of these belongs to the generation instead of the step.

    A probe whose peak cannot be reset has the peak since the start of the process. It belongs to no
    phase and to no generation, and only `read` and `sample_step` return it.

    Thread-safe. A reading takes 0.02 ms, and 0.1 ms with cold caches.

    Attributes:
        budgets: Configured limits by device, in bytes.
    """

    def __init__(
        self,
        probes: Mapping[str, Callable[[], Reading | None]],
        budgets: Mapping[str, float],
        has_own_peaks: Callable[[str], bool] = lambda device: True,
    ) -> None:
        """Create a reader.

        Args:
            probes: Functions that read a device, by device. They return None after a failure.
            budgets: Configured limits by device, in bytes. A budget can only lower a limit.
            has_own_peaks: Whether the peak of a device covers only the time since its last reading.
        """
        self._has_own_peaks = has_own_peaks
        self._probes = probes
        self.budgets = budgets
        self._lock = threading.Lock()
        self._step_peaks: dict[tuple[str, str], float] = {}
        self._phase_peaks: dict[tuple[str, str], float] = {}
        self._generation_peaks: dict[tuple[str, str], float] = {}
        self._earlier_peaks: dict[tuple[str, str], float] = {}
        self._is_generating = False
        self._read_at = float("-inf")

    @property
    def age_seconds(self) -> float:
        """The seconds since the last reading of all devices."""
        return time.monotonic() - self._read_at

    def read(self, only: str | None = None) -> Readings:
        """Return bytes by device and state. Peaks cover the time since the previous reading.

        Args:
            only: The one device to read. If None, all are read.
        """
        with self._lock:
            return self._read(only)

    def sample_step(self) -> Readings:
        """Return the readings, with the peaks since the last `sample_step`."""
        with self._lock:
            readings = self._read()
            peaks, self._step_peaks, self._phase_peaks = self._step_peaks, {}, {}
        return _with_peaks(readings, peaks)

    def end_step_peaks(self) -> None:
        """Let the next `sample_step` have only peaks from now on, and keep those before apart."""
        with self._lock:
            self._read()
            for key, size in self._step_peaks.items():
                self._earlier_peaks[key] = max(self._earlier_peaks.get(key, 0.0), size)
            self._step_peaks = {}

    def take_earlier_peaks(self) -> Readings:
        """Return the peaks that `end_step_peaks` has kept since the last call, by device and state.

        A device without peaks of its own is absent.
        """
        with self._lock:
            peaks, self._earlier_peaks = self._earlier_peaks, {}
        return _by_device(peaks)

    def sample_phase(self) -> Readings:
        """Return the readings, with the peaks since the last `sample_phase` or `sample_step`.

        A device without peaks of its own has no peaks.
        """
        with self._lock:
            readings = self._read()
            peaks, self._phase_peaks = self._phase_peaks, {}
        return {
            device: states
            if self._has_own_peaks(device)
            else {state: value for state, value in states.items() if state not in _PEAKS}
            for device, states in _with_peaks(readings, peaks).items()
        }

    def begin_generation(self) -> None:
        """Count the peaks from now on for generation, and not for the step."""
        self._switch(is_generating=True)

    def end_generation(self) -> None:
        """Count the peaks from now on for the step again."""
        self._switch(is_generating=False)

    def take_generation_peaks(self) -> Readings:
        """Return the peaks of generation since the last call, by device and state.

        A device without peaks of its own is absent.
        """
        with self._lock:
            peaks, self._generation_peaks = self._generation_peaks, {}
        return _by_device(peaks)

    def _switch(self, *, is_generating: bool) -> None:
        with self._lock:
            self._read()
            self._is_generating = is_generating

    def _read(self, only: str | None = None) -> Readings:
        if only is None:
            self._read_at = time.monotonic()
        readings: dict[str, Reading] = {}
        for device, read in self._probes.items():
            states = read() if only in (None, device) else None
            if states:
                readings[device] = self._apply_budget(device, states)
                self._update_peaks(device, states)
        return readings

    def _apply_budget(self, device: str, states: Reading) -> Reading:
        budget = self.budgets.get(device)
        if budget is None or budget >= states.get("limit", float("inf")):
            return states
        return {**states, "limit": budget}

    def _update_peaks(self, device: str, states: Reading) -> None:
        if not self._has_own_peaks(device):
            return
        own = self._generation_peaks if self._is_generating else self._step_peaks
        for state in _PEAKS:
            if state in states:
                for peaks in (own, self._phase_peaks):
                    key = device, state
                    peaks[key] = max(peaks.get(key, 0.0), states[state])


def _by_device(peaks: Mapping[tuple[str, str], float]) -> Readings:
    by_device: dict[str, dict[str, float]] = {}
    for (device, state), size in peaks.items():
        by_device.setdefault(device, {})[state] = size
    return by_device


def _with_peaks(readings: Readings, peaks: Mapping[tuple[str, str], float]) -> Readings:
    return {
        device: {state: peaks.get((device, state), value) for state, value in states.items()}
        for device, states in readings.items()
    }
