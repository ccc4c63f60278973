"""Reads the memory of one device from torch's allocator: its counters, or all its blocks."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Callable, Mapping
from operator import is_
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary, ref

import torch

from ..common import accelerator
from ..common.report_files import create_private
from .shared_peak_counters import STATS, SharedPeakCounters

# Interval between readings of the device's free memory. memory_info calls the driver, which takes
# longer than all other readings together.
_LIMIT_SECONDS = 10.0
# Memory state of a reading, statistic of torch's allocator, and which value of the statistic.
_STATES = (
    ("allocated", "allocated_bytes", "current"),
    ("reserved", "reserved_bytes", "current"),
    ("peak_allocated", "allocated_bytes", "peak"),
    ("peak_reserved", "reserved_bytes", "peak"),
    ("inactive_split", "inactive_split_bytes", "current"),
)


class MemoryStats(Protocol):
    """Lists the members of `Accelerator` that `CudaMemory` needs."""

    kind: str
    captured_graphs: WeakValueDictionary[int, Any]

    def is_initialized(self) -> bool:
        """Return whether the device is in use."""

    def memory_stats(self, index: int, /) -> dict[str, Any]:
        """Return the allocator's statistics, nested; empty before the device is initialized."""

    def memory_info(self, index: int, /) -> tuple[int, int]:
        """Return the free and total bytes of the device, over all processes."""

    def memory_fraction(self, index: int, /) -> float:
        """Return the fraction of the device's memory that this process may use, 0 to 1."""

    def has_expandable_segments(self) -> bool:
        """Return whether the allocator can return free parts of a segment to the device."""

    def private_pool_bytes(self, index: int, /) -> int:
        """Return the free bytes in private pools, except `inactive_split_bytes`."""


class CudaMemory:
    """Reads the allocator's counters of one device, without synchronizing with it.

    With `peaks`, a peak covers the time since the last reading. Without `peaks`, a peak covers the
    time since the start of the process or the script's last reset of the peak counters.

    `limit` is the upper bound of `reserved`. It is the device's total memory minus the memory that
    other processes and CUDA itself hold. It is at most the share that
    `set_per_process_memory_fraction` allows. The memory of other processes is read every ten
    seconds, and after each shortage: a request that failed or that the allocator had to repeat.

    `unusable` is reserved and free, but cannot be returned to the device, and serves only requests
    that fit into its pieces: the free pieces of segments that are partly in use (`inactive_split`).
    The next step may use them again; `fragmented_bytes` in `step_sample.py` subtracts those that
    the last peak used. A segment that is free as a whole does not count, because the allocator
    returns such a segment before it fails. Nor does a block that was freed while another stream may
    still use it, because the allocator waits for that stream first. With expandable segments, the
    allocator returns free pieces too, and they do not count.

    What is free in the private pool of a captured graph counts always: the allocator neither lends
    nor returns it as long as the graph exists. To find it takes a reading of all blocks, which may
    take 0.3 s. So it is read again, within ten seconds, only if graphs have been captured, reset or
    freed, and after a shortage, then every ten seconds at most. If only some graphs were freed,
    their pools count until the allocator has returned them. Without any graph nothing counts, also
    not the pools that a script makes itself.
    """

    def __init__(
        self,
        device_index: int,
        device: MemoryStats,
        now: Callable[[], float] = time.monotonic,
        peaks: SharedPeakCounters | None = None,
    ) -> None:
        """Create the probe of one device.

        Args:
            device_index: torch's index of the device.
            device: The accelerator.
            now: A monotonic clock, in seconds.
            peaks: Resets the peak counters at each reading. If None, they are not reset.
        """
        self.device = f"{device.kind}:{device_index}"
        self._index = device_index
        self._device = device
        self._peaks = peaks
        self._now = now
        self._available = self._total = 0.0
        self._num_shortages = 0
        self._has_expandable_segments = False
        # Those of the last reading. They are compared by identity: a graph that was reset may have
        # captured again, and a new graph may have the id of a freed one.
        self._graphs: list[ref[Any]] = []
        self._private_pool_bytes = 0
        self._limit_due = self._pools_due = float("-inf")
        self._was_short = False  # since the last reading of the pools

    @property
    def own_peaks(self) -> bool:
        """Whether each reading resets the allocator's peaks, so that a peak belongs to one step."""
        return self._peaks is not None

    def read(self) -> Mapping[str, float]:
        """Return bytes by state and the count alloc_retries, or {} before CUDA is in use."""
        stats = self._stats()
        if not stats:
            return {}
        readings = {state: float(stats[group]["all"][when]) for state, group, when in _STATES}
        readings["limit"] = self._limit_bytes(stats, readings["reserved"])
        in_pieces = 0.0 if self._has_expandable_segments else readings["inactive_split"]
        readings["unusable"] = in_pieces + self._private_pool_bytes
        readings["alloc_retries"] = float(stats["num_alloc_retries"])
        return readings

    def close(self) -> None:
        """Restore torch's functions, if they were wrapped. Safe to call twice."""
        if self._peaks is not None:
            self._peaks.restore()

    def _stats(self) -> Mapping[str, Any]:
        if not self._device.is_initialized():
            return {}
        if self._peaks is not None:
            return self._peaks.drain(self._index)
        return self._device.memory_stats(self._index)

    def _limit_bytes(self, stats: Mapping[str, Any], reserved: float) -> float:
        now, num_shortages = self._now(), stats["num_alloc_retries"] + stats["num_ooms"]
        is_short = num_shortages != self._num_shortages
        if now >= self._limit_due or is_short:
            self._limit_due, self._num_shortages = now + _LIMIT_SECONDS, num_shortages
            free, self._total = self._device.memory_info(self._index)
            self._available = free + reserved
            self._has_expandable_segments = self._device.has_expandable_segments()
            self._was_short |= is_short
            self._read_private_pools(now)
        return min(self._available, self._device.memory_fraction(self._index) * self._total)

    def _read_private_pools(self, now: float) -> None:
        references = self._device.captured_graphs.valuerefs()  # other threads may capture graphs
        graphs: list[ref[Any]] = [each for each in references if each() is not None]
        is_same = len(graphs) == len(self._graphs) and all(map(is_, graphs, self._graphs))
        if not is_same or (self._was_short and now >= self._pools_due):
            self._graphs, self._was_short, self._pools_due = graphs, False, now + _LIMIT_SECONDS
            self._private_pool_bytes = 0
            if graphs:
                self._private_pool_bytes = self._device.private_pool_bytes(self._index)


def device_memory(device_index: int, *, reset_peak: bool) -> CudaMemory:
    """Return the probe of a device. The caller must close it to restore the peak counters.

    Args:
        device_index: torch's index of the device.
        reset_peak: Whether each reading resets the allocator's peaks, if the device uses CUDA's.
    """
    # A build of torch without CUDA has nothing to reset.
    resets = reset_peak and accelerator.current.kind == "cuda" and hasattr(torch._C, STATS)
    peaks = SharedPeakCounters(torch._C) if resets else None
    return CudaMemory(device_index, accelerator.current, peaks=peaks)


def dump_snapshot(device: str, path: Path) -> bool:
    """Write all blocks of the allocator to a file for torch's memory viewer. Never raises.

    Only the file's owner can read it.

    Stacks and history are included if `_record_memory_history` is on.

    Returns:
        Whether the file was written.
    """
    if not device.startswith(accelerator.current.kind):
        return False
    try:
        os.close(create_private(path))
        accelerator.current.dump_memory_snapshot(str(path))
    except (OSError, RuntimeError, MemoryError, AttributeError, ValueError, pickle.PickleError):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # half a file would not load
        return False
    return True
