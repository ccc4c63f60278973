"""Fake of the allocator statistics of an accelerator and of torch._C."""

from __future__ import annotations

import types
from typing import Any
from weakref import WeakValueDictionary

_COUNTED = ("allocation", "segment", "active", "inactive_split")
_SIZED = ("allocated", "reserved", "active", "inactive_split", "requested")
_GROUPS = (*_COUNTED, *(f"{name}_bytes" for name in _SIZED))
_OVERSIZE = ("oversize_allocations", "oversize_segments")


class FakeCudaMemory:
    kind = "cuda"

    def __init__(self, *, free: int, total: int, share: float = 1.0) -> None:
        self.free, self.total, self.share = free, total, share
        groups = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes", "active_bytes")
        self.current = dict.fromkeys(groups, 0)
        self.peak = dict(self.current)
        self.retries = self.ooms = 0
        self.expandable = False
        self.initialized = True
        self.info_calls = 0
        self.captured_graphs: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.pool_bytes = self.num_snapshots = 0

    def is_initialized(self) -> bool:
        return self.initialized

    def memory_stats(self, device: int, /) -> dict[str, Any]:
        if not self.initialized:
            return {}
        stats: dict[str, Any] = {
            name: {"all": {"current": self.current[name], "peak": self.peak[name]}}
            for name in self.current
        }
        return {**stats, "num_alloc_retries": self.retries, "num_ooms": self.ooms}

    def memory_info(self, device: int, /) -> tuple[int, int]:
        self.info_calls += 1
        return self.free, self.total

    def memory_fraction(self, device: int, /) -> float:
        return self.share

    def has_expandable_segments(self) -> bool:
        return self.expandable

    def private_pool_bytes(self, device: int, /) -> int:
        self.num_snapshots += 1
        return self.pool_bytes


class FakeAllocator(types.ModuleType):
    """One device's allocator as `torch._C` shows it: what is in use, its peak, a private pool."""

    def __init__(self) -> None:
        super().__init__("torch._C")
        self.bytes = self.peak = 0
        self.has_pool = True

        def stats(device: int) -> dict[str, Any]:
            now = {"current": self.bytes, "peak": self.peak, "allocated": 7, "freed": 3}
            by_pool = {"all": now, "large_pool": now, "small_pool": now}
            groups = {name: by_pool for name in _GROUPS} | {name: now for name in _OVERSIZE}
            private = {(0, 1): {"all": dict(now)}} if self.has_pool else {}
            retries = {"num_alloc_retries": 0, "num_ooms": 0}
            return {**groups, **retries, "reserved_bytes_by_private_pools": private}

        def reset(device: int) -> None:
            self.peak = self.bytes

        self._cuda_memoryStats = self._accelerator_getDeviceStats = stats
        self._cuda_resetPeakMemoryStats = self._accelerator_resetPeakStats = reset

    def use(self, size: int) -> None:
        """Set the bytes in use."""
        self.bytes = size
        self.peak = max(self.peak, size)
