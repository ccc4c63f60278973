"""Calls handed over together, and their times settled once the device has passed them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .call import Call
from .events import EventPool

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Batch:
    """Calls in the order in which they were noted.

    On CUDA, `anchor` is an event recorded when the batch was taken: device times are measured
    against it, because elapsed times are float32 and lose precision over hours.
    """

    calls: list[Call]
    anchor: torch.cuda.Event | None = None

    def settled(self) -> bool:
        """Whether every call has ended and can be read. Never waits."""
        if self.anchor is not None and not self.anchor.query():
            return False
        for call in self.calls:  # a plain loop: this runs for every step
            if (call.start_event is not None or not call.end_ns) and not _ended(call):
                return False
        return True

    def resolve(self, events: EventPool) -> None:
        """Turn the event pairs of timed calls into intervals, in nanoseconds before the anchor."""
        anchor = self.anchor
        if anchor is None or not anchor.query():
            return
        for call in self.calls:
            if not call.timed or call.start_event is None or call.end_event is None:
                continue
            call.start_ns = -int(call.start_event.elapsed_time(anchor) * 1e6)
            call.end_ns = -int(call.end_event.elapsed_time(anchor) * 1e6)
            events.give_back(call.start_event)
            events.give_back(call.end_event)
        events.give_back(anchor)

    def give_up(self) -> int:
        """Mark the calls that cannot be read as not timed; return how many those are."""
        no_anchor = self.anchor is not None and not self.anchor.query()
        late = 0
        for call in self.calls:
            if call.timed and ((no_anchor and call.start_event is not None) or not _ended(call)):
                call.timed = False
                late += 1
        return late


def _ended(call: Call) -> bool:
    if not call.timed:
        return True
    if call.start_event is None:
        return call.end_ns != 0
    return call.end_event is not None and call.end_event.query()
