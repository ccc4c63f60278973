"""Calls handed over together, and their times settled once the device has passed them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .call import CollectiveCall, StreamWait
from .events import EventPool

if TYPE_CHECKING:
    import torch

# The compute stream is still busy with what came before it would wait, and the call has ended.
_NOT_REACHED = 2**63


@dataclass(slots=True)
class Batch:
    """Calls in the order in which they were noted.

    On CUDA, `anchor` is an event recorded when the batch was taken: device times are measured
    against it, because elapsed times are float32 and lose precision over hours.
    """

    calls: list[CollectiveCall]
    anchor: torch.cuda.Event | None = None

    def settled(self) -> bool:
        """Whether every call has ended and can be read. Never waits."""
        if self.anchor is not None and not self.anchor.query():
            return False
        for call in self.calls:  # a plain loop: this runs for every step
            if (call.start_event is not None or not call.end_ns) and not _ended(call):
                return False
        return True

    def read_events(self, events: EventPool) -> None:
        """Turn the events of timed calls into times, in nanoseconds before the anchor."""
        anchor = self.anchor
        if anchor is None or not anchor.query():
            return
        joins: dict[StreamWait, int] = {}
        for call in self.calls:
            if not call.timed or call.start_event is None or call.end_event is None:
                continue
            holds_compute = call.issued_ns > call.start_ns  # by the host's clock
            call.start_ns = _time(call.start_event, anchor)
            call.end_ns = _time(call.end_event, anchor)
            call.issued_ns = call.end_ns if holds_compute else call.start_ns
            events.release(call.start_event)
            events.release(call.end_event)
            if call.join is not None:
                call.wait_ns = _wait_began(call, call.join, joins, anchor) or 1  # 0 is no wait
                call.join.num_calls -= 1
                if not call.join.num_calls:
                    events.release(call.join.event)
        events.release(anchor)

    def discard(self) -> int:
        """Settle all calls as not timed, as nobody will look at them; return how many those are."""
        for call in self.calls:
            call.timed = False
            call.settle()
        return len(self.calls)

    def expire(self) -> int:
        """Mark the calls that cannot be read as not timed; return how many those are."""
        no_anchor = self.anchor is not None and not self.anchor.query()
        late = 0
        for call in self.calls:
            if call.timed and ((no_anchor and call.start_event is not None) or not _ended(call)):
                call.timed = False
                late += 1
        return late


def _ended(call: CollectiveCall) -> bool:
    if not call.timed:
        return True
    if call.start_event is None:
        return call.end_ns != 0
    return call.end_event is not None and call.end_event.query()


def _time(event: torch.cuda.Event, anchor: torch.cuda.Event) -> int:
    return -int(event.elapsed_time(anchor) * 1e6)


def _wait_began(
    call: CollectiveCall, join: StreamWait, joins: dict[StreamWait, int], anchor: torch.cuda.Event
) -> int:
    """Return when the compute stream had nothing left to wait for but this call.

    Where it waits for several at once each instant belongs to one of them; `joins` holds how far
    each wait is accounted for.
    """
    if join not in joins:
        joins[join] = _time(join.event, anchor) if join.event.query() else _NOT_REACHED
    began = joins[join]
    joins[join] = max(began, call.end_ns)
    return began
