"""Memory of one GPU as torch's allocator accounts for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

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

    def memory_stats_as_nested_dict(self, device: int, /) -> dict[str, Any]:
        """Return the allocator's statistics; empty while CUDA is not initialised."""

    def mem_get_info(self, device: int, /) -> tuple[int, int]:
        """Return the free and total bytes of the device, for all processes."""


class CudaMemory:
    """Reads the allocator's counters; never synchronises the device.

    Peaks are those since the start of the process, or since the training script last called
    `torch.cuda.reset_peak_memory_stats`. They are not reset here: the script's own figures would
    change. `limit` is the device's total less what other processes and CUDA itself hold, comparable
    with `reserved`, and no more than `set_per_process_memory_fraction` grants.
    """

    def __init__(
        self,
        device_index: int,
        cuda: CudaMemoryStats,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device = f"cuda:{device_index}"
        self._index = device_index
        self._cuda = cuda
        self._clock = clock
        self._limit = 0.0
        self._limit_due = float("-inf")

    def read(self) -> Mapping[str, float]:
        """Return bytes by state and the count alloc_retries; nothing before CUDA is in use."""
        stats = self._cuda.memory_stats_as_nested_dict(self._index)
        if not stats:
            return {}
        readings = {state: float(stats[group]["all"][when]) for state, group, when in _STATES}
        readings["limit"] = self._limit_bytes(readings["reserved"])
        readings["alloc_retries"] = float(stats["num_alloc_retries"])
        return readings

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


def cuda_memory(device_index: int) -> CudaMemory:
    """Return the probe of one of torch's CUDA devices."""
    import torch

    return CudaMemory(device_index, torch.cuda)
