"""Fake streams and events of an accelerator, on simulated time; nothing is computed.

A stream is a time until which it is busy; the host runs ahead of it until it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fakes.sleeping_collectives import MS, FakeWork, ManualClock

from zerowatch.runtime.common import accelerator


class FakeStream:
    device: FakeCuda

    def __init__(self) -> None:
        self.cuda_stream = id(self)
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


class FakeEvent:
    device: FakeCuda

    def __init__(self, enable_timing: bool = False) -> None:
        self.at: int | None = None
        self.device.num_events += 1

    def record(self, stream: FakeStream | None = None) -> None:
        self.device.check()
        assert not self.device.capturing, "an event was recorded into a graph"
        self.device.num_records += 1
        self.at = (stream or self.device.current).reached()

    def wait(self, stream: FakeStream | None = None) -> None:
        stream = stream or self.device.current
        stream.busy_until = max(stream.busy_until, self.at or 0)

    def synchronize(self) -> None:
        self.device.host.reach(self.at or 0)

    def query(self) -> bool:
        self.device.check()
        return self.at is not None and self.at <= self.device.host.now_ns

    def elapsed_time(self, later: FakeEvent) -> float:
        self.device.check()
        assert self.query(), "the event has not passed"
        assert later.query(), "the event has not passed"
        return (later.at - self.at) / MS


class FakeFuture:
    """Done for the host as soon as it is made; its callbacks run on a stream that awaits its end.

    So it is with the futures of NCCL's handles.
    """

    def __init__(self, device: FakeCuda, end: int) -> None:
        self.device, self.end = device, end

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        stream = self.device.Stream()
        stream.busy_until = self.end
        with self.device.stream(stream):
            callback(self)


class FakeCuda:
    """One device with a stream of NCCL's own for each group. `all_reduce` replaces torch's.

    It takes `tensor[0]` milliseconds.

    Attributes:
        is_broken: Whether a kernel has failed, as in a device-side assert. Each call of the runtime
            then raises, until the process ends.
    """

    kind = "cuda"
    collective_backend = "nccl"
    stream_handle = staticmethod(accelerator.CudaAccelerator.stream_handle)

    def __init__(self, host: ManualClock) -> None:
        self.host = host
        self.capturing = self.is_broken = False
        self.num_events = self.num_records = 0
        self.Stream = type("Stream", (FakeStream,), {"device": self})
        self.Event = type("Event", (FakeEvent,), {"device": self})
        self.current: FakeStream = self.Stream()
        self.streams = [self.current]
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

    def is_initialized(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return self.capturing

    def current_stream(self) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def new_stream(self) -> FakeStream:
        self.streams.append(self.Stream())
        return self.streams[-1]

    def synchronize(self) -> None:
        for stream in self.streams:
            self.host.reach(stream.busy_until)

    def all_reduce(
        self, tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> FakeWork | None:
        if group not in self._of_group:
            self._of_group[group] = self.new_stream()
        nccl, issuing = self._of_group[group], self.current
        nccl.busy_until = max(nccl.busy_until, issuing.reached())
        nccl.run(float(tensor[0]))
        end = nccl.busy_until
        self.host.reach(self.host.now_ns + 1)  # to issue it takes the host some time

        def wait() -> None:
            self.current.busy_until = max(self.current.busy_until, end)

        if not async_op:
            return wait()
        return FakeWork(FakeFuture(self, end), wait)
