"""Fake streams and events of an accelerator, on simulated time; nothing is computed.

A stream is a time until which it is busy; the host runs ahead of it until it waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from fakes.sleeping_collectives import MS, FakeWork, ManualClock

from zerowatch.runtime.common import accelerator

POOL_SIZE = 32  # torch's, for each device and priority


class DeviceTensor(torch.Tensor):
    """A tensor in host memory that claims to be on device 0."""

    def get_device(self) -> int:
        return 0


class FakeStream:
    device: FakeCuda

    def __init__(self, device_index: int = 0) -> None:
        self.cuda_stream = id(self)
        self.device_index = device_index
        self.busy_until = 0

    def run(self, milliseconds: float) -> None:
        """Queue work."""
        self.busy_until = self.reached() + int(milliseconds * MS)

    def reached(self) -> int:
        """Return the time at which the next queued work would start."""
        return max(self.busy_until, self.device.host.now_ns)

    def record_event(self) -> FakeEvent:
        event = self.device.Event()
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: FakeStream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.device.host.reach(self.busy_until)

    def query(self) -> bool:
        return self.busy_until <= self.device.host.now_ns


class FakeEvent:
    device: FakeCuda

    def __init__(self, enable_timing: bool = False) -> None:
        self.at: int | None = None
        self.device_index: int | None = None  # that of the first stream it was recorded on
        self.device.num_events += 1

    def record(self, stream: FakeStream | None = None) -> None:
        self.device.check()
        assert not self.device.capturing, "an event was recorded into a graph"
        stream = stream or self.device.current_stream()
        if self.device_index not in (None, stream.device_index):
            raise RuntimeError("Event device does not match recording stream's device")
        self.device_index = stream.device_index
        self.device.num_records += 1
        self.at = stream.reached()

    def wait(self, stream: FakeStream | None = None) -> None:
        stream = stream or self.device.current
        stream.busy_until = max(stream.busy_until, self.at or 0)

    def synchronize(self) -> None:
        self.device.host.reach(self.at or 0)

    def query(self) -> bool:
        self.device.check()
        self.device.queried_by.add(threading.current_thread().name)
        return self.at is None or self.at <= self.device.host.now_ns

    def elapsed_time(self, later: FakeEvent) -> float:
        self.device.check()
        if self.at is None or later.at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not self.query() or not later.query():
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        if self.device_index != later.device_index:
            raise RuntimeError("CUDA error: invalid resource handle")
        return (later.at - self.at) / MS


class FakeFuture:
    """Completed at the issue of its call, like the future of NCCL's handles.

    A callback therefore runs at once, in the thread that adds it. torch calls it on the next stream
    of the pool, after that stream was made to wait for the end of the call. Both this and `wait`
    record the outputs on the waiting stream, so the allocator keeps their memory until that stream
    has passed the end. `wait` makes the current stream of the outputs' device wait, whichever
    device is the current one.
    """

    def __init__(self, device: FakeCuda, device_index: int, end: int, outputs: object) -> None:
        self.device, self.end, self.outputs = device, end, outputs
        self.device_index = device_index

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        with self.device.stream(self.device.next_of_pool()):
            self.wait()
            callback(self)

    def wait(self) -> object:
        stream = self.device.stream_of(self.device_index)
        stream.busy_until = max(stream.busy_until, self.end)
        self.device.recorded_on.append(stream)
        return self.outputs


class FakeGraph:
    """A captured graph: nothing runs until it is replayed."""

    device: FakeCuda

    def capture_begin(self) -> None:
        self.device.capturing = True

    def capture_end(self) -> None:
        self.device.capturing = False

    def replay(self) -> None:
        """Run what was captured, unseen by Python."""

    def reset(self) -> None:
        """Release what was captured."""


class FakeCuda:
    """One device with a stream of NCCL's own for each group. `all_reduce` replaces torch's.

    It takes `tensor[0]` milliseconds. Streams come from a pool of POOL_SIZE, as in torch: whoever
    asks for one may get a stream that somebody uses already.

    Attributes:
        current_index: The current device of the calling thread.
        used_devices: The devices on which streams were asked for, which creates a context there.
        prepared: The current device of each thread that was prepared for queries, by its name.
        queried_by: The names of the threads that have queried an event.
        can_prepare: Whether threads can be prepared for queries.
        recorded_on: The streams on which the outputs of collectives were recorded.
        is_broken: Whether a kernel has failed, as in a device-side assert. Each call of the runtime
            then raises, until the process ends.
    """

    kind = "cuda"
    collective_backend = "nccl"
    stream_handle = staticmethod(accelerator.CudaAccelerator.stream_handle)

    def __init__(self, host: ManualClock) -> None:
        self.host = host
        self.capturing = self.is_broken = False
        self.prepared: dict[str, int] = {}
        self.queried_by: set[str] = set()
        self.can_prepare = True
        self.num_events = self.num_records = 0
        self.Stream = type("Stream", (FakeStream,), {"device": self})
        self.Event = type("Event", (FakeEvent,), {"device": self})
        self.Graph = type("Graph", (FakeGraph,), {"device": self})
        self.captured_graphs: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.current_index = 0
        self._current: dict[int, FakeStream] = {}  # by device
        self.used_devices: set[int] = set()
        self.recorded_on: list[FakeStream] = []
        self.pool = [self.Stream() for _ in range(POOL_SIZE)]
        self.private: list[FakeStream] = []
        self._num_taken = 0
        self._of_group: dict[Any, FakeStream] = {}

    def check(self) -> None:
        """Raise the error of an earlier kernel, if one has failed."""
        if self.is_broken:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    def patch(self, monkeypatch: Any) -> None:
        """Replace the accelerator by this fake."""
        monkeypatch.setattr(accelerator, "current", self)

    @property
    def module(self) -> FakeCuda:
        return self

    def is_built(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def get_rng_state(self) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Do nothing."""

    def is_capturing(self) -> bool:
        return self.capturing

    def prepare_thread(self, index: int) -> bool:
        if self.can_prepare:
            self.prepared[threading.current_thread().name] = index
        return self.can_prepare

    def current_device(self) -> int:
        return self.current_index

    @property
    def current(self) -> FakeStream:
        return self.stream_of(self.current_index)

    @current.setter
    def current(self, stream: FakeStream) -> None:
        self._current[stream.device_index] = stream

    def stream_of(self, device_index: int) -> FakeStream:
        """Return the current stream of a device."""
        if device_index not in self._current:
            self._current[device_index] = self.Stream(device_index)
        return self._current[device_index]

    def current_stream(self) -> FakeStream:
        self.used_devices.add(self.current_index)
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Make a stream and its device current, as in torch."""
        device_before, self.current_index = self.current_index, stream.device_index
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before
            self.current_index = device_before

    on_stream = stream
    record_event = staticmethod(FakeEvent.record)

    def query_event(self, event: Any) -> bool:
        return event.query()

    def ask_driver(self) -> None:
        """It answers at once."""

    def next_of_pool(self) -> FakeStream:
        """Return what torch returns for a new stream: the next one of the pool."""
        self._num_taken += 1
        return self.pool[(self._num_taken - 1) % POOL_SIZE]

    new_stream = next_of_pool

    def has_one_queue(self) -> bool:
        return accelerator.CudaAccelerator().has_one_queue()

    def private_stream(self) -> FakeStream:
        self.private.append(self.Stream(self.current_index))
        return self.private[-1]

    def synchronize(self) -> None:
        for stream in (self.current, *self.pool, *self.private):
            self.host.reach(stream.busy_until)

    def all_reduce(
        self, tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> FakeWork | None:
        index = max(0, tensor.get_device())  # NCCL uses the device of the payload
        if (group, index) not in self._of_group:
            new = self.Stream(index) if index else self.new_stream()
            self._of_group[group, index] = new
        nccl = self._of_group[group, index]
        nccl.busy_until = max(nccl.busy_until, self.stream_of(index).reached())
        nccl.run(float(tensor[0]))
        end = nccl.busy_until
        self.host.reach(self.host.now_ns + 1)  # to issue it takes the host some time

        def wait() -> None:
            waiting = self.stream_of(index)
            waiting.busy_until = max(waiting.busy_until, end)

        if not async_op:
            return wait()
        return FakeWork(FakeFuture(self, index, end, tensor), wait)
