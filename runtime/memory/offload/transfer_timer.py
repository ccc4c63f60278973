"""Adds up the bytes and seconds of transfers by direction, without synchronizing the device.

A transfer inside another interrupts it, so that no time counts twice. The time of a transfer is
split over its directions in proportion to their bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter_ns
from typing import NamedTuple

from ...collectives.event_pool import EventPool
from ...common import accelerator
from ...common.accelerator import Event
from .transfer_sizes import TransferBytes

DIRECTIONS = TransferBytes._fields
# Maximum number of unread event pairs; further transfers are counted but not timed.
MAX_UNREAD = 16_384


class _Transfer(NamedTuple):
    num_bytes: TransferBytes
    on_stream: bool


class OffloadTimer:
    """Times the transfers of the training thread; another thread reads the device's events.

    Attributes:
        bytes: Bytes moved, by direction in the order of `DIRECTIONS`.
    """

    def __init__(self, events: EventPool | None) -> None:
        """Create a timer whose sums are zero.

        Args:
            events: Pool of events for copies on a stream of the device; None if the host copies.
        """
        self.bytes = [0] * len(DIRECTIONS)
        self._host_ns = [0.0] * len(DIRECTIONS)
        self._device_ns = [0.0] * len(DIRECTIONS)  # of the thread that reads events
        self._events = events
        self._active: list[_Transfer] = []
        self._started: int | Event | None = None  # of the innermost transfer
        self._unread: deque[tuple[TransferBytes, Event, Event]] = deque()

    def seconds(self) -> list[float]:
        """Return the seconds known so far, by direction in the order of `DIRECTIONS`."""
        pairs = zip(self._host_ns, self._device_ns, strict=True)
        return [(host + device) / 1e9 for host, device in pairs]

    def add(self, transfer: TransferBytes) -> None:
        """Add a transfer's bytes to the sums."""
        for index, num_bytes in enumerate(transfer):
            if num_bytes:
                self.bytes[index] += num_bytes

    def start(self, transfer: TransferBytes, on_stream: bool = True) -> None:
        """Start timing a transfer on this thread.

        Args:
            transfer: The bytes of the transfer, by direction.
            on_stream: Whether the device's current stream carries it out, and not the host.
        """
        if self._active:
            self._pause()
        self._active.append(_Transfer(transfer, on_stream and self._events is not None))
        self._started = self._now()

    def stop(self) -> None:
        """Stop the innermost transfer and resume the one around it."""
        self._pause()
        self._active.pop()
        if self._active:
            self._started = self._now()

    def read_events(self) -> None:
        """Read the times of completed device transfers. Not called on the training thread.

        If the current stream changed within a transfer, its start is on another stream than its
        end, and the device may pass the end first.
        """
        if self._events is not None and self._events.disabled:
            self._unread.clear()  # this thread must not query the device
            return
        while self._unread and all(event.query() for event in self._unread[0][1:]):
            transfer, start, end = self._unread.popleft()
            _split_time(self._device_ns, transfer, start.elapsed_time(end) * 1e6)
            if self._events is not None:
                self._events.release(start)
                self._events.release(end)

    def _now(self) -> int | Event | None:
        """Return a time mark for the innermost transfer; None if it cannot be timed."""
        if not self._active[-1].on_stream:
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
        """Add the time of the innermost transfer since it started or resumed."""
        started, self._started = self._started, None
        transfer = self._active[-1].num_bytes
        if isinstance(started, int):
            _split_time(self._host_ns, transfer, perf_counter_ns() - started)
        elif started is not None and self._events is not None:
            self._unread.append((transfer, started, self._events.record()))


def _split_time(sums: list[float], transfer: Sequence[int], nanoseconds: float) -> None:
    total = sum(transfer)
    for index, num_bytes in enumerate(transfer):
        if num_bytes:
            sums[index] += nanoseconds * num_bytes / total
