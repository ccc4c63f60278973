"""Shares the allocator's peak counters between the training script and zerowatch.

Both reset these counters. A few functions of `torch._C` serve all of torch's functions that return
CUDA's peaks: `memory_stats`, `max_memory_allocated`, `max_memory_reserved`, `memory_summary`, their
older names, and those of `torch.accelerator`. These functions of `torch._C` are wrapped. The script
sees the same peaks as without zerowatch, and zerowatch loses no peak when the script resets
counters. Accumulated counts have no peaks and are not changed.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..common.patching import PatchSet

# Functions of `torch._C` that read and reset the counters.
STATS = "_cuda_memoryStats"
RESET = "_cuda_resetPeakMemoryStats"
ACCELERATOR_STATS = "_accelerator_getDeviceStats"
ACCELERATOR_RESET = "_accelerator_resetPeakStats"

Stats = dict[Any, Any]
Peaks = dict[tuple[Any, ...], int]  # by the names that lead to a peak in Stats
_PEAK = "peak"


class SharedPeakCounters:
    """Gives the script and zerowatch separate views of the counters until `restore`.

    Each view stores, by device, the peaks that were cleared when the other side reset the counters.
    A peak in the microseconds between a reading and its reset is lost. After `restore` the script's
    view begins at the last reading.
    """

    def __init__(self, owner: Any) -> None:
        """Wrap the functions that read and reset the peak counters.

        Args:
            owner: `torch._C`, or a fake; names that it lacks are skipped.
        """
        self._stats: Callable[[int], Stats] = getattr(owner, STATS)
        self._reset: Callable[[int], None] = getattr(owner, RESET)
        self._script_peaks: defaultdict[int, Peaks] = defaultdict(dict)
        self._own_peaks: defaultdict[int, Peaks] = defaultdict(dict)
        self._lock = threading.Lock()
        self._open = True
        makers = {
            STATS: self._stats_for_script,
            ACCELERATOR_STATS: self._stats_for_script,
            RESET: self._reset_for_script,
            ACCELERATOR_RESET: self._reset_for_script,
        }
        self._patches = PatchSet()
        for name, make in makers.items():
            self._patches.add_existing(owner, [name], make)

    def drain(self, device: int) -> Stats:
        """Return the allocator's statistics, with peaks since `drain` was last called."""
        with self._lock:
            stats = self._stats(device)
            if not self._open:
                return stats
            self._reset(device)
            add_peaks(self._script_peaks[device], stats)
            own = self._own_peaks.pop(device, None)
            return stats if own is None else with_peaks(stats, own)

    def restore(self) -> None:
        """Restore the original functions. Safe to call twice."""
        self._open = False
        self._patches.restore()

    def _stats_for_script(self, original: Any) -> Any:
        def stats(device: int) -> Stats:
            if torch.compiler.is_compiling() or not self._open:
                return original(device)  # type: ignore[no-any-return]
            with self._lock:
                return with_peaks(original(device), self._script_peaks[device])

        return stats

    def _reset_for_script(self, original: Any) -> Any:
        def reset(device: int) -> Any:
            if torch.compiler.is_compiling() or not self._open:
                return original(device)
            with self._lock:
                add_peaks(self._own_peaks[device], self._stats(device))
                self._script_peaks.pop(device, None)
                return original(device)

        return reset


def add_peaks(peaks: Peaks, stats: Mapping[Any, Any], names: tuple[Any, ...] = ()) -> None:
    """Add the peaks in `stats` to `peaks`, which keeps the larger of two.

    Args:
        peaks: Peaks by the names that lead to them, such as `("allocated_bytes", "all")`.
        stats: Nested statistics, as `Accelerator.memory_stats` returns them.
        names: The names that lead to `stats`.
    """
    peak = stats.get(_PEAK)
    if peak is not None:  # a statistic, which contains no other
        if peak > peaks.get(names, -1):
            peaks[names] = peak
        return
    for name, value in stats.items():
        if isinstance(value, dict):
            add_peaks(peaks, value, (*names, name))


def with_peaks(
    stats: Mapping[Any, Any], peaks: Mapping[tuple[Any, ...], int], names: tuple[Any, ...] = ()
) -> Stats:
    """Return `stats` with each peak raised to the peak in `peaks`, if the latter is larger.

    Peaks of a pool that no longer exists are left out. The arguments are those of `add_peaks`.
    """
    raised = dict(stats)
    for name, value in stats.items():
        if isinstance(value, dict):
            raised[name] = with_peaks(value, peaks, (*names, name))
        elif name == _PEAK:
            raised[name] = max(value, peaks.get(names, value))
    return raised
