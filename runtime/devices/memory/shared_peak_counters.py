"""Two readers of one peak: the allocator's marks are set back after each step, and nobody notices.

All that torch tells of CUDA's peaks, under whatever name it was imported, goes through a few
functions of `torch._C`: `memory_stats`, `max_memory_allocated`, `max_memory_reserved`,
`memory_summary`, their older names, and those of `torch.accelerator`. They are wrapped, so that the
training script goes on seeing what it would have seen, and a reset of its own loses no peak of
ours. Accumulated counts have no peaks and are left alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...common.patching import AttributePatch

STATS, RESET = "_cuda_memoryStats", "_cuda_resetPeakMemoryStats"
ACCELERATOR_STATS, ACCELERATOR_RESET = "_accelerator_getDeviceStats", "_accelerator_resetPeakStats"

Stats = dict[Any, Any]
_PEAK = "peak"


class SharedPeakCounters:
    """Wraps the functions of an owner from construction until `restore`.

    Both views hold, by device, the peaks that the other's resets have taken away from them. A peak
    in the microseconds between a reading and its reset is lost. After `restore` the script's view
    begins at the last reading.
    """

    def __init__(self, owner: Any) -> None:
        """Wrap.

        Args:
            owner: `torch._C`, or what stands in for it; names that it has not are passed over.
        """
        self._stats: Callable[[int], Stats] = getattr(owner, STATS)
        self._reset: Callable[[int], None] = getattr(owner, RESET)
        self._of_script: dict[int, Stats] = {}
        self._of_ours: dict[int, Stats] = {}
        self._lock = threading.Lock()
        self._open = True
        makers = {
            STATS: self._seen_by_script,
            ACCELERATOR_STATS: self._seen_by_script,
            RESET: self._reset_by_script,
            ACCELERATOR_RESET: self._reset_by_script,
        }
        self._wraps = [
            AttributePatch(owner, name, make)
            for name, make in makers.items()
            if hasattr(owner, name)
        ]

    def take(self, device: int) -> Stats:
        """Return the allocator's statistics, with peaks since `take` was last called."""
        with self._lock:
            stats = self._stats(device)
            if not self._open:
                return stats
            peaks = peaks_in(stats)
            self._reset(device)
            self._of_script[device] = larger_peaks(self._of_script.get(device, {}), peaks)
            return with_peaks(stats, self._of_ours.pop(device, {}))

    def restore(self) -> None:
        """Put the very same functions back. Safe to call twice."""
        self._open = False
        for wrap in self._wraps:
            wrap.restore()
        self._wraps.clear()

    def _seen_by_script(self, original: Any) -> Any:
        def stats(device: int) -> Stats:
            if torch.compiler.is_compiling() or not self._open:
                return original(device)  # type: ignore[no-any-return]
            with self._lock:
                return with_peaks(original(device), self._of_script.get(device, {}))

        return stats

    def _reset_by_script(self, original: Any) -> Any:
        def reset(device: int) -> Any:
            if torch.compiler.is_compiling() or not self._open:
                return original(device)
            with self._lock:
                peaks = peaks_in(self._stats(device))
                self._of_ours[device] = larger_peaks(self._of_ours.get(device, {}), peaks)
                self._of_script.pop(device, None)
                return original(device)

        return reset


def peaks_in(stats: Mapping[Any, Any]) -> Stats:
    """Return the nested dictionaries of `stats` with nothing in them but the peaks."""
    peaks: Stats = {}
    for name, value in stats.items():
        if name == _PEAK:
            peaks[name] = value
        elif isinstance(value, dict) and (inner := peaks_in(value)):
            peaks[name] = inner
    return peaks


def larger_peaks(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> Stats:
    """Return all peaks of both, and of a peak that both have the larger one."""
    merged = {**one, **other}
    for name in one.keys() & other.keys():
        if name == _PEAK:
            merged[name] = max(one[name], other[name])
        else:
            merged[name] = larger_peaks(one[name], other[name])
    return merged


def with_peaks(stats: Mapping[Any, Any], peaks: Mapping[Any, Any]) -> Stats:
    """Return `stats` with the larger peaks; what is not in them, such as a pool gone, is not added.

    Args:
        stats: Statistics as `torch.cuda.memory_stats_as_nested_dict` gives them.
        peaks: What `peaks_in` took from earlier ones.
    """
    raised = dict(stats)
    for name in stats.keys() & peaks.keys():
        if name == _PEAK:
            raised[name] = max(stats[name], peaks[name])
        else:
            raised[name] = with_peaks(stats[name], peaks[name])
    return raised
