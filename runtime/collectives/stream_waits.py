"""Finds which collectives the compute stream waits for, and when that wait begins.

A call may be issued or waited for on a stream other than the compute stream. Such a call does not
block the compute stream by itself. The other stream carries the call until the compute stream or
the host waits for that stream.
`StreamWaitTracker` records which stream carries which calls. `StreamHooks` wraps the functions by
which streams and the host wait.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from typing import Any, Protocol

import torch

from ..common import accelerator
from ..common.accelerator import Event, Stream
from ..common.fail_open import FailOpen
from ..common.patching import PatchSet
from ..common.phase_timer import OTHER, PhaseTimer
from .event_pool import EventPool
from .groups import CollectiveCall, StreamWait

# Maximum number of calls that a stream carries. Older calls have probably ended.
MAX_CARRIED = 512


class StreamWaitTracker:
    """Records an event on the compute stream at each point where it begins to wait for calls.

    Attributes:
        dropped_in_capture: Number of calls and waits that were left out because a graph was being
            captured.
    """

    def __init__(self, events: EventPool) -> None:
        self.dropped_in_capture = 0
        self._events = events
        self._accelerator = accelerator.current
        self._current_stream = self._accelerator.current_stream
        self._is_capturing = self._accelerator.is_capturing
        self._handle_of = self._accelerator.stream_handle
        self._phase_timer: PhaseTimer | None = None
        self._compute: Stream | None = None
        self._carried: dict[int | None, deque[CollectiveCall]] = {}
        self._recorded: weakref.WeakKeyDictionary[Event, tuple[CollectiveCall, ...]] = (
            weakref.WeakKeyDictionary()
        )

    def connect(self, phase_timer: PhaseTimer | None) -> None:
        """Make the current stream the compute stream, and tag waits with the timer's phase."""
        self._phase_timer = phase_timer
        self._compute = self._current_stream() if self._accelerator.is_initialized() else None
        self._carried.clear()
        self._recorded.clear()

    def drops_in_capture(self, num_calls: int) -> bool:
        """Return whether the current stream captures a graph. If so, count the calls as dropped."""
        capturing = self._is_capturing()
        self.dropped_in_capture += num_calls * capturing
        return capturing

    def blocks_compute(self, calls: Iterable[CollectiveCall]) -> bool:
        """Return whether synchronous calls block the compute stream.

        Calls that are issued on the compute stream block it. If the current stream is another
        stream, that stream carries the calls.
        """
        stream = self._current_stream()
        if self._compute is None:
            self._compute = stream
        if stream == self._compute:
            return True
        self._carry(stream, calls)
        return False

    def on_call_wait(self, call: CollectiveCall) -> None:
        """Record that the current stream is about to wait for an asynchronous call."""
        self._awaited(self._current_stream(), (call,))

    def on_stream_wait(self, waiting: Stream, stream: Stream) -> None:
        """Record that a stream is about to wait for all work queued on another stream."""
        carried = self._carried.get(self._handle_of(stream))
        if carried:
            self._awaited(waiting, carried)
            if waiting == self._compute:
                carried.clear()

    def on_event_record(self, event: Event, stream: Stream | None = None) -> None:
        """Record that an event marks this moment on a stream, by default the current stream."""
        if not self._carried:
            return
        carried = self._carried.get(self._handle_of(stream or self._current_stream()))
        if carried:
            self._recorded[event] = tuple(carried)
        else:
            self._recorded.pop(event, None)

    def on_event_wait(self, event: Event, stream: Stream | None = None) -> None:
        """Record that a stream is about to wait for an event."""
        carried = self._recorded.get(event)
        if carried:
            self._awaited(stream or self._current_stream(), carried)

    def on_stream_sync(self, stream: Stream) -> None:
        """Record that the host is about to wait for a stream.

        The host does not queue any compute while it waits. An event is recorded on the compute
        stream, and the device reaches the event once the compute stream has run out of work.
        """
        carried = self._carried.get(self._handle_of(stream))
        if carried and stream != self._compute:
            self._mark_wait(carried)
            carried.clear()

    def on_event_sync(self, event: Event) -> None:
        """Record that the host is about to wait for an event."""
        self._mark_wait(self._recorded.pop(event, ()))

    def on_device_sync(self) -> None:
        """Record that the host is about to wait for all streams."""
        for carried in list(self._carried.values()):
            self._mark_wait(carried)
            carried.clear()

    def _awaited(self, waiting: Stream, calls: Iterable[CollectiveCall]) -> None:
        if waiting == self._compute:
            self._mark_wait(calls)
        else:
            self._carry(waiting, calls)

    def _carry(self, stream: Stream, calls: Iterable[CollectiveCall]) -> None:
        carried = self._carried.setdefault(self._handle_of(stream), deque(maxlen=MAX_CARRIED))
        carried.extend(calls)

    def _mark_wait(self, calls: Iterable[CollectiveCall]) -> None:
        """Mark this moment on the compute stream for the calls that it has not waited for yet."""
        # Settled calls ended long before this moment, so the stream does not wait for them.
        blocking = [
            call
            for call in list(calls)  # a copy, because other threads may add calls
            if call.stream_wait is None and not call.settled and call.start_event is not None
        ]
        if not blocking or self._compute is None or self.drops_in_capture(len(blocking)):
            return
        wait = StreamWait(self._events.record(self._compute), len(blocking))
        phase = OTHER if self._phase_timer is None else self._phase_timer.current
        for call in blocking:
            call.wait_phase = phase
            call.stream_wait = wait


class ReentryFlag(Protocol):
    """Holds, for each thread, whether the thread is inside a wrapped function."""

    value: bool


class StreamHooks:
    """Wraps the functions by which streams and the host wait, from `open` until `close`.

    `open` does nothing if torch was built without the accelerator. Waits and events from C++ or
    from `torch.accelerator` are not seen. While the hooks are closed, or inside another wrapped
    function, a wrapper just calls the original function.

    Attributes:
        cost_ns: Nanoseconds that recording took.
    """

    def __init__(self, fail_open: FailOpen, waits: StreamWaitTracker, inside: ReentryFlag) -> None:
        self.cost_ns = 0
        self._inside = inside
        self._open = False
        self._patches = PatchSet()
        self._accelerator = accelerator.current
        device = self._accelerator
        # `Stream.wait_event` calls `Event.wait`, and `Stream.record_event` calls `Event.record`.
        hooks: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
            (device.Stream, "wait_stream", waits.on_stream_wait),
            (device.Stream, "synchronize", waits.on_stream_sync),
            (device.Event, "record", waits.on_event_record),
            (device.Event, "wait", waits.on_event_wait),
            (device.Event, "synchronize", waits.on_event_sync),
            (device.module, "synchronize", lambda *_, **__: waits.on_device_sync()),
        )
        self._hooks = [
            (owner, name, fail_open.wrap("streams", hook)) for owner, name, hook in hooks
        ]

    def open(self) -> None:
        """Wrap the functions, unless they are wrapped already."""
        if self._open or not self._accelerator.is_built():
            return
        self._open = True
        for owner, name, hook in self._hooks:
            self._patches.add(owner, name, self._wrapper(hook))

    def close(self) -> None:
        """Restore the functions."""
        self._open = False
        self._patches.restore()

    def _wrapper(self, hook: Callable[..., Any]) -> Callable[[Any], Any]:
        is_compiling, inside = torch.compiler.is_compiling, self._inside

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def hooked(*args: Any, **kwargs: Any) -> Any:
                if is_compiling() or not self._open or inside.value:
                    return original(*args, **kwargs)
                inside.value = True
                try:
                    entered_ns = perf_counter_ns()
                    hook(*args, **kwargs)
                    self.cost_ns += perf_counter_ns() - entered_ns
                    return original(*args, **kwargs)
                finally:
                    inside.value = False

            return hooked

        return make
