"""Sums of bytes and seconds by direction; stretches that move data, timed without waiting.

A stretch inside another interrupts it, so that no instant counts twice. It belongs to the
directions that move bytes in it, shared by their bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter_ns
from typing import NamedTuple

from ...collectives.events import EventPool
from ...common import accelerator
from ...common.accelerator import Event
from .transfer_sizes import Moves

DIRECTIONS = Moves._fields
# So many pairs of events may wait to be read; what comes on top is counted and not timed.
MAX_UNREAD = 16_384


class _Stretch(NamedTuple):
    moves: Moves
    on_stream: bool


class OffloadClock:
    """Counts on the training thread; `settle` reads device times on another.

    Attributes:
        bytes: Bytes moved, by direction in the order of `DIRECTIONS`.
    """

    def __init__(self, events: EventPool | None) -> None:
        """Start at zero.

        Args:
            events: Where events come from for copies that a stream of the device carries out;
                None where the host does them itself.
        """
        self.bytes = [0] * len(DIRECTIONS)
        self._host_ns = [0.0] * len(DIRECTIONS)
        self._device_ns = [0.0] * len(DIRECTIONS)  # of the thread that settles
        self._events = events
        self._under_way: list[_Stretch] = []
        self._started: int | Event | None = None  # of the innermost stretch
        self._unread: deque[tuple[Moves, Event, Event]] = deque()

    def seconds(self) -> list[float]:
        """Return the seconds known so far, by direction."""
        pairs = zip(self._host_ns, self._device_ns, strict=True)
        return [(host + device) / 1e9 for host, device in pairs]

    def count(self, moves: Moves) -> None:
        """Count bytes."""
        for index, num_bytes in enumerate(moves):
            if num_bytes:
                self.bytes[index] += num_bytes

    def begin(self, moves: Moves, on_stream: bool = True) -> None:
        """Begin a stretch on this thread.

        Args:
            moves: What moves in it.
            on_stream: Whether the device's current stream does it, and not the host.
        """
        if self._under_way:
            self._pause()
        self._under_way.append(_Stretch(moves, on_stream and self._events is not None))
        self._started = self._now()

    def end(self) -> None:
        """End the innermost stretch; the one around it goes on."""
        self._pause()
        self._under_way.pop()
        if self._under_way:
            self._started = self._now()

    def settle(self) -> None:
        """Read the device times that have come in. Called on one thread, never while training."""
        while self._unread and self._unread[0][2].query():
            moves, start, end = self._unread.popleft()
            _share(self._device_ns, moves, start.elapsed_time(end) * 1e6)
            if self._events is not None:
                self._events.release(start)
                self._events.release(end)

    def _now(self) -> int | Event | None:
        """Mark this moment for the innermost stretch; None where it cannot be timed."""
        if not self._under_way[-1].on_stream:
            return perf_counter_ns()
        if (
            self._events is None
            or self._events.disabled
            or len(self._unread) >= MAX_UNREAD
            or accelerator.current.is_capturing()
        ):
            return None
        return self._events.record()

    def _pause(self) -> None:
        """Add what the innermost stretch took since it began or went on."""
        started, self._started = self._started, None
        moves = self._under_way[-1].moves
        if isinstance(started, int):
            _share(self._host_ns, moves, perf_counter_ns() - started)
        elif started is not None and self._events is not None:
            self._unread.append((moves, started, self._events.record()))


def _share(sums: list[float], moves: Sequence[int], nanoseconds: float) -> None:
    total = sum(moves)
    for index, num_bytes in enumerate(moves):
        if num_bytes:
            sums[index] += nanoseconds * num_bytes / total
