"""A kind of accelerator that zerowatch does not know: tensors on the host, and its own class only.

The methods are what a class for another kind in `runtime/common/accelerator.py` has. Its clock
counts the events: each event is recorded a millisecond after the one before. The device lags: it
has passed an event only when it is asked for the second time. Its peak of memory grows and is never
reset.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._C._autograd import DeviceType

from zerowatch.runtime.common.accelerator import Accelerator

GIB = 2**30
MIB = 2**20
_CLOCK = count(1)


class HostStream:
    def wait_stream(self, stream: Any) -> None:
        """Work on the host is done already."""

    def synchronize(self) -> None:
        """Work on the host is done already."""


class HostEvent:
    recorded = passed = 0  # the last event in the queue, and the last that the device has passed

    def __init__(self, enable_timing: bool = False) -> None:
        self.milliseconds = 0

    def record(self, stream: Any = None) -> None:
        HostEvent.recorded = self.milliseconds = next(_CLOCK)

    def wait(self, stream: Any = None) -> None:
        """Work on the host is done already."""

    def synchronize(self) -> None:
        """Work on the host is done already."""

    def query(self) -> bool:
        has_passed = 0 < self.milliseconds <= HostEvent.passed
        HostEvent.passed = HostEvent.recorded
        return has_passed

    def elapsed_time(self, end_event: Any) -> float:
        return float(end_event.milliseconds - self.milliseconds)


class HostGraph:
    def capture_begin(self) -> None:
        raise NotImplementedError

    def capture_end(self) -> None:
        raise NotImplementedError

    def replay(self) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        raise NotImplementedError


class HostAccelerator:
    kind = "cpu"
    collective_backend = "gloo"
    Stream: Any = HostStream
    Event: Any = HostEvent
    Graph: Any = HostGraph
    profiler_device: Any = DeviceType.CPU

    def __init__(self) -> None:
        self.module: Any = types.ModuleType("host_device")
        self.module.synchronize = lambda: None
        self._stream = HostStream()
        self.peak_bytes = 2 * GIB
        self.captured_graphs: WeakValueDictionary[int, Any] = WeakValueDictionary()

    def is_built(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def device_name(self, index: int) -> str:
        return "Host"

    def device_uuid(self, index: int) -> str:
        return "0001"

    def is_slice(self, index: int) -> bool:
        return False

    def hardware_id(self, index: int) -> str:
        return "HOST-0001"

    def current_stream(self) -> Any:
        return self._stream

    def record_event(self, event: HostEvent, stream: Any) -> None:
        event.record(stream)

    def query_event(self, event: HostEvent) -> bool:
        return event.query()

    def ask_driver(self) -> None:
        """There is no driver."""

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        yield

    def has_one_queue(self) -> bool:
        return False

    def private_stream(self) -> Any:
        return None

    def stream_handle(self, stream: Any) -> int | None:
        return id(stream)

    def is_capturing(self) -> bool:
        return False

    def prepare_thread(self, index: int) -> bool:
        return True

    def memory_stats(self, index: int) -> dict[str, Any]:
        groups = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes", "active_bytes")
        self.peak_bytes += MIB
        stats = {name: {"all": {"current": GIB, "peak": self.peak_bytes}} for name in groups}
        return {**stats, "num_alloc_retries": 0, "num_ooms": 0}

    def memory_info(self, index: int) -> tuple[int, int]:
        return 7 * GIB, 8 * GIB

    def memory_fraction(self, index: int) -> float:
        return 1.0

    def has_expandable_segments(self) -> bool:
        return False

    def private_pool_bytes(self, index: int) -> int:
        return 0

    def empty_cache(self) -> None:
        """There is no cache."""

    def start_memory_history(self, max_entries: int) -> bool:
        return False

    def stop_memory_history(self) -> None:
        """There is no history."""

    def dump_memory_snapshot(self, path: str) -> None:
        raise NotImplementedError

    def get_rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


def host_accelerator() -> Accelerator:
    """Return the accelerator; mypy checks that it has all members."""
    return HostAccelerator()
