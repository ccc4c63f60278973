"""Pools timing events of one device of the accelerator, which mark moments on its streams."""

from __future__ import annotations

import logging
from collections import deque

from ..common import accelerator
from ..common.accelerator import Event, Stream

logger = logging.getLogger(__name__)

# Maximum number of unused events that are kept. They come back once a second: some 6,000 calls.
POOL_SIZE = 16384


class EventPool:
    """Lends timing events, and reuses an event after it was read. No method waits.

    Attributes:
        disabled: True if callers must not record events, because events cannot be read.
    """

    def __init__(self) -> None:
        self.disabled = False
        self._free: deque[Event] = deque(maxlen=POOL_SIZE)
        self._make = accelerator.current.Event
        self._record = accelerator.current.record_event
        self._current_stream = accelerator.current.current_stream

    def disable(self, reason: object) -> None:
        """Stop the use of events, because they cannot be read."""
        if not self.disabled:
            self.disabled = True
            logger.warning(
                "collectives and phases are not timed on the device any more: %s. From now on the "
                "phases of steps are times of the host, and the times of collectives are unknown.",
                reason,
            )

    def record(self, stream: Stream | None = None) -> Event:
        """Mark this moment on a stream, by default on the current one."""
        event = self.take()
        # torch would ask for the current stream in three times the time.
        self._record(event, stream or self._current_stream())
        return event

    def take(self) -> Event:
        """Return an event that is to be recorded."""
        try:
            return self._free.pop()
        except IndexError:
            event: Event = self._make(enable_timing=True)
            return event

    def release(self, event: Event) -> None:
        """Return an event to the pool after it was read."""
        self._free.append(event)

    def clear(self) -> None:
        """Discard the events, which can only be recorded on streams of their first device."""
        self._free.clear()
