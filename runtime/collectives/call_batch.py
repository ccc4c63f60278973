"""Defines a batch of recorded calls, which the training thread passes to the watch thread.

Calls on a device are timed by events. The watch thread reads an event once the device has passed
it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..common.hot_path import have_ended_on_host
from .event_pool import EventPool
from .groups import CollectiveCall, StreamWait

if TYPE_CHECKING:
    from ..common.accelerator import Event

# A time in nanoseconds that is later than any other. It stands for the start of a wait if the call
# has ended and the compute stream has not begun to wait.
_NOT_REACHED = 2**63 - 1
# Held to mark the end of a message, and to read a batch without the messages that have no end yet.
MESSAGE_ENDS = threading.Lock()


@dataclass(slots=True)
class CallBatch:
    """A batch of recorded calls, in the order in which they returned.

    Attributes:
        calls: The calls.
        anchor: An event of about the time when the batch was drained; None if the batch has no
            device calls. Device times are measured relative to the anchor, because elapsed times
            are float32 and would lose precision over hours. It may be the end of one of the calls.
        is_complete: False if there were further calls or waits, whose times are unknown: in a graph
            that was captured or replayed, or because recording them failed.
    """

    calls: list[CollectiveCall]
    anchor: Event | None = None
    is_complete: bool = True

    def is_read(self) -> bool:
        """Return whether no event need be read, as each call has ended by the host's clock."""
        return self.anchor is None and have_ended_on_host(self.calls)

    def settled(self) -> bool:
        """Return whether every call has ended and can be read. This method never waits."""
        if self.is_read():  # this runs for every step
            return True
        if self.anchor is not None and not self.anchor.query():
            return False
        for call in self.calls:
            if (call.start_event is not None or not call.end_ns) and not _ended(call):
                return False
        return True

    def read_events(self, events: EventPool) -> None:
        """Set the times of calls timed by events, in nanoseconds relative to the anchor.

        The events are then released to the pool. This method does nothing until the device has
        passed the anchor. A call whose end the device has not passed is not timed.

        Raises:
            RuntimeError: The device failed, or events of different devices were recorded.
            ValueError: The start of a call was not reached, although its end was.
        """
        with MESSAGE_ENDS:
            for call in self.calls:
                if not call.timed:
                    call.settled = True  # from now on the end of a message is no longer marked
        anchor = self.anchor
        if anchor is None or not anchor.query():
            return
        waited_until: dict[StreamWait, int] = {}
        for call in self.calls:
            if call.start_event is None:
                continue
            if not call.timed or call.end_event is None:
                events.release(call.start_event)
                continue
            blocks_compute = call.issued_ns > call.start_ns  # by the host's clock
            try:
                times = _time(call.start_event, anchor), _time(call.end_event, anchor)
            except (RuntimeError, ValueError):
                if call.end_event.query():
                    raise
                call.timed = False  # the end of a message was marked after `settled`
                events.release(call.start_event)
                continue
            call.start_ns, call.end_ns = times
            call.issued_ns = call.end_ns if blocks_compute else call.start_ns
            events.release(call.start_event)
            if call.end_event is not anchor:
                events.release(call.end_event)
            wait = call.stream_wait
            if wait is not None:
                # 0 would mean that nothing waited for the call, so 1 is used instead.
                call.wait_ns = _wait_start(call, wait, waited_until, anchor) or 1
                wait.num_calls -= 1
                if not wait.num_calls:
                    events.release(wait.event)
        events.release(anchor)

    def take_out_of_training(self) -> None:
        """Let no call count as exposed: the step that they blocked has not ended.

        No training time contains such a step, so the exposed time could not be compared with it.
        """
        for call in self.calls:
            call.issued_ns, call.wait_ns = call.start_ns, 0

    def discard(self) -> int:
        """Mark all calls as settled and not timed, and return their number.

        This is used for a batch that is dropped, so that nothing waits for the end of its calls.
        """
        for call in self.calls:
            call.timed = False
            call.settle()
        self.anchor = None  # nothing is read any more
        return len(self.calls)

    def lose(self) -> int:
        """Mark all timed calls as lost, because events cannot be read, and return their number."""
        lost = [call for call in self.calls if call.timed]
        for call in lost:
            call.timed, call.is_lost = False, True
            call.settle()
        self.anchor = None  # nothing is read any more
        return len(lost)

    def expire(self) -> int:
        """Mark the calls that cannot be read as lost, and return their number.

        A call that nothing has waited for is not timed, but not lost.
        """
        no_anchor = self.anchor is not None and not self.anchor.query()
        late = 0
        for call in self.calls:
            if call.timed and ((no_anchor and call.start_event is not None) or not _ended(call)):
                call.timed = False
                call.is_lost = not call.is_bound or call.end_event is not None
                late += call.is_lost
        return late


def _ended(call: CollectiveCall) -> bool:
    if not call.timed:
        return True
    if call.start_event is None:
        return call.end_ns != 0
    return call.end_event is not None and call.end_event.query()


def _time(event: Event, anchor: Event) -> int:
    return -int(event.elapsed_time(anchor) * 1e6)


def _wait_start(
    call: CollectiveCall, wait: StreamWait, waited_until: dict[StreamWait, int], anchor: Event
) -> int:
    """Return the time from which on a wait of the compute stream counts for this call.

    Several calls may share one wait, and each instant of the wait counts for one call only.
    `waited_until` holds the time up to which each wait has been counted so far.
    """
    if wait not in waited_until:
        waited_until[wait] = _time(wait.event, anchor) if wait.event.query() else _NOT_REACHED
    start = waited_until[wait]
    waited_until[wait] = max(start, call.end_ns)
    return start
