"""Memory of one GPU as torch's allocator accounts for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from .shared_peak_counters import STATS, SharedPeakCounters

_LIMIT_SECONDS = 10.0  # mem_get_info asks the driver, which takes longer than all the rest
_STATES = (
    ("allocated", "allocated_bytes", "current"),
    ("reserved", "reserved_bytes", "current"),
    ("peak_allocated", "allocated_bytes", "peak"),
    ("peak_reserved", "reserved_bytes", "peak"),
    ("inactive_split", "inactive_split_bytes", "current"),
)


class CudaMemoryStats(Protocol):
    """The part of `torch.cuda` that is needed here."""

    def is_initialized(self) -> bool:
        """Return whether CUDA is in use."""

    def memory_stats_as_nested_dict(self, device: int, /) -> dict[str, Any]:
        """Return the allocator's statistics; empty while CUDA is not initialised."""

    def mem_get_info(self, device: int, /) -> tuple[int, int]:
        """Return the free and total bytes of the device, for all processes."""


class CudaMemory:
    """Reads the allocator's counters; never synchronises the device.

    Peaks are those since the last reading, where they are kept for the training script as well.
    Else they are those since the start of the process, or since the script's last
    `torch.cuda.reset_peak_memory_stats`.

    `limit` is the device's total less what other processes and CUDA itself hold, comparable with
    `reserved`, and no more than `set_per_process_memory_fraction` grants.

    `unusable` is reserved and free, and serves no large request: free pieces of segments of which
    other pieces are in use (`inactive_split`), and blocks that were freed while another stream may
    still use them (active less allocated). A segment that is free as a whole is not among them, as
    the allocator gives it back before it gives up. With expandable segments free pieces can be
    unmapped, so that this is too much.
    """

    def __init__(
        self,
        device_index: int,
        cuda: CudaMemoryStats,
        clock: Callable[[], float] = time.monotonic,
        peaks: SharedPeakCounters | None = None,
    ) -> None:
        """Describe the probe.

        Args:
            device_index: torch's index of the device.
            cuda: `torch.cuda`.
            clock: Seconds.
            peaks: What resets peaks and keeps them; None to leave them alone.
        """
        self.device = f"cuda:{device_index}"
        self._index = device_index
        self._cuda = cuda
        self._peaks = peaks
        self._clock = clock
        self._limit = 0.0
        self._limit_due = float("-inf")

    @property
    def own_peaks(self) -> bool:
        """Whether the allocator's peaks are reset at each reading."""
        return self._peaks is not None

    def read(self) -> Mapping[str, float]:
        """Return bytes by state and the count alloc_retries; nothing before CUDA is in use."""
        stats = self._stats()
        if not stats:
            return {}
        readings = {state: float(stats[group]["all"][when]) for state, group, when in _STATES}
        awaited = stats["active_bytes"]["all"]["current"] - readings["allocated"]
        readings["unusable"] = readings["inactive_split"] + awaited
        readings["limit"] = self._limit_bytes(readings["reserved"])
        readings["alloc_retries"] = float(stats["num_alloc_retries"])
        return readings

    def close(self) -> None:
        """Put torch's functions back, if they were wrapped. Safe to call twice."""
        if self._peaks is not None:
            self._peaks.restore()

    def _stats(self) -> Mapping[str, Any]:
        if not self._cuda.is_initialized():
            return {}
        if self._peaks is not None:
            return self._peaks.take(self._index)
        return self._cuda.memory_stats_as_nested_dict(self._index)

    def _limit_bytes(self, reserved: float) -> float:
        now = self._clock()
        if now >= self._limit_due:
            self._limit_due = now + _LIMIT_SECONDS
            free, total = self._cuda.mem_get_info(self._index)
            self._limit = min(free + reserved, self._granted_share() * total)
        return self._limit

    def _granted_share(self) -> float:
        # torch 2.6 can set this share, but has no function to ask for it.
        ask = getattr(self._cuda, "get_per_process_memory_fraction", None)
        return float(ask(self._index)) if ask else 1.0


def cuda_memory(device_index: int, *, reset_peak: bool) -> CudaMemory:
    """Return the probe of one of torch's CUDA devices; close it if it resets peaks."""
    import torch

    # A build of torch without CUDA has nothing to reset.
    resets = reset_peak and hasattr(torch._C, STATS)
    return CudaMemory(
        device_index, torch.cuda, peaks=SharedPeakCounters(torch._C) if resets else None
    )
