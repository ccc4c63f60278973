"""What holds the compute stream: the calls that it must await before it goes on, and since when.

A call that is issued or waited for on another stream does not hold it by itself: that stream then
carries the call, until the compute stream, or the host, waits for what that stream carries.
It knows nothing of how it learns of streams and events; see `stream_hooks.py`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable

import torch

from .call import CollectiveCall, StreamWait
from .events import EventPool

# The calls that a stream carries while nobody joins it; those before are likely to have ended.
MAX_CARRIED = 512


class StreamWaitTracker:
    """Marks the moment at which the compute stream began to wait for each call.

    Args:
        events: Where the events come from.
        phase: Tells the phase under way.
        capturing: Whether a CUDA graph is being captured; counts so many marks that are left out.
    """

    def __init__(
        self, events: EventPool, phase: Callable[[], int], capturing: Callable[[int], bool]
    ) -> None:
        self._events = events
        self._phase = phase
        self._capturing = capturing
        self._compute: torch.cuda.Stream | None = None
        self._carried: dict[int | None, deque[CollectiveCall]] = {}
        self._recorded: weakref.WeakKeyDictionary[torch.cuda.Event, tuple[CollectiveCall, ...]] = (
            weakref.WeakKeyDictionary()
        )

    def connect(self) -> None:
        """Take the current stream for the compute stream."""
        self._compute = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._carried.clear()
        self._recorded.clear()

    def blocks_compute(self, calls: Iterable[CollectiveCall]) -> bool:
        """Whether synchronous calls were issued on the compute stream, which then waits for them.

        Else the current stream carries them.
        """
        stream = torch.cuda.current_stream()
        if self._compute is None:
            self._compute = stream
        if stream == self._compute:
            return True
        self._carry(stream, calls)
        return False

    def waits(self, call: CollectiveCall) -> None:
        """Note that the current stream is about to wait for an asynchronous call."""
        self._awaited(torch.cuda.current_stream(), (call,))

    def on_stream_wait(self, waiting: torch.cuda.Stream, stream: torch.cuda.Stream) -> None:
        """Note that a stream is about to wait for all that another has been given."""
        carried = self._carried.get(_key(stream))
        if carried:
            self._awaited(waiting, carried)
            if waiting == self._compute:
                carried.clear()

    def records(self, event: torch.cuda.Event, stream: torch.cuda.Stream | None = None) -> None:
        """Note that an event marks a moment on a stream, by default on the current one."""
        if not self._carried:
            return
        carried = self._carried.get(_key(stream or torch.cuda.current_stream()))
        if carried:
            self._recorded[event] = tuple(carried)
        else:
            self._recorded.pop(event, None)

    def on_event_wait(
        self, event: torch.cuda.Event, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Note that a stream is about to wait for an event."""
        carried = self._recorded.get(event)
        if carried:
            self._awaited(stream or torch.cuda.current_stream(), carried)

    def on_stream_sync(self, stream: torch.cuda.Stream) -> None:
        """Note that the host is about to wait for a stream: meanwhile nobody feeds the compute one.

        An event on the compute stream passes once that has run dry.
        """
        carried = self._carried.get(_key(stream))
        if carried and stream != self._compute:
            self._hold(carried)
            carried.clear()

    def on_event_sync(self, event: torch.cuda.Event) -> None:
        """Note that the host is about to wait for an event."""
        self._hold(self._recorded.pop(event, ()))

    def on_device_sync(self) -> None:
        """Note that the host is about to wait for all streams."""
        for carried in list(self._carried.values()):
            self._hold(carried)
            carried.clear()

    def _awaited(self, waiting: torch.cuda.Stream, calls: Iterable[CollectiveCall]) -> None:
        if waiting == self._compute:
            self._hold(calls)
        else:
            self._carry(waiting, calls)

    def _carry(self, stream: torch.cuda.Stream, calls: Iterable[CollectiveCall]) -> None:
        carried = self._carried.setdefault(_key(stream), deque(maxlen=MAX_CARRIED))
        carried.extend(calls)

    def _hold(self, calls: Iterable[CollectiveCall]) -> None:
        """Mark the moment on the compute stream, for calls that it did not await before."""
        # What has settled ended long before the host came here: nothing waits for that.
        held = [
            call
            for call in list(calls)  # other threads may add to them
            if call.join is None and not call.settled and call.start_event is not None
        ]
        if not held or self._compute is None or self._capturing(len(held)):
            return
        join, phase = StreamWait(self._events.record(self._compute), len(held)), self._phase()
        for call in held:
            call.wait_phase = phase
            call.join = join


def _key(stream: torch.cuda.Stream) -> int | None:
    """Tell streams apart; a generic `torch.Stream` has no such number, and carries nothing."""
    return getattr(stream, "cuda_stream", None)
