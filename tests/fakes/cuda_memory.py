"""The part of torch.cuda that tells about memory, over plain numbers."""

from __future__ import annotations

from typing import Any


class FakeCudaMemory:
    def __init__(self, *, free: int, total: int, share: float = 1.0) -> None:
        self.free, self.total, self.share = free, total, share
        self.current = {"allocated_bytes": 0, "reserved_bytes": 0, "inactive_split_bytes": 0}
        self.peak = dict(self.current)
        self.retries = 0
        self.initialized = True
        self.info_calls = 0

    def memory_stats_as_nested_dict(self, device: int, /) -> dict[str, Any]:
        if not self.initialized:
            return {}
        stats: dict[str, Any] = {
            name: {"all": {"current": self.current[name], "peak": self.peak[name]}}
            for name in self.current
        }
        return {**stats, "num_alloc_retries": self.retries}

    def mem_get_info(self, device: int, /) -> tuple[int, int]:
        self.info_calls += 1
        return self.free, self.total

    def get_per_process_memory_fraction(self, device: int, /) -> float:
        return self.share
