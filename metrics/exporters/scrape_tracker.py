"""Tracks scrapes by client, to decide how long an ending rank waits for the last one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

INTERVALS_OF_PATIENCE = 1.2
INTERVALS_UNTIL_GONE = 3  # after so many without a scrape the client is no longer waited for
# Enough gaps that two servers which cannot be distinguished still show their interval.
REMEMBERED_SCRAPES = 5
MAX_CLIENTS = 16


@dataclass(slots=True)
class _Client:
    """A client: the times of its last scrapes, and whether it has read that the run is over."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_SCRAPES))
    end_was_read: bool = False

    @property
    def interval_seconds(self) -> float | None:
        """The longest of its last intervals; None after a single scrape."""
        return max((later - earlier for earlier, later in pairwise(self.times)), default=None)

    def is_regular(self, now: float) -> bool:
        """Whether it scrapes at intervals, and has not stopped."""
        interval = self.interval_seconds
        return interval is not None and now - self.times[-1] <= INTERVALS_UNTIL_GONE * interval


class ScrapeTracker:
    """The last scrapes of each client, and which clients have not read the end of the run.

    Each Prometheus must read that the run is over, or it reports the rank as down. A single
    request, such as from a browser, neither starts, ends nor extends the wait.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._clients: dict[str, _Client] = {}
        self._changed = threading.Condition()
        self._deadline: float | None = None

    def note(self, client: str, *, run_active: float | None) -> None:
        """Record a scrape by `client`, answered with this value of run_active."""
        with self._changed:
            seen = self._clients.pop(client, None) or _Client()
            seen.times.append(self._now())
            seen.end_was_read = run_active == 0
            self._clients[client] = seen  # at the end: the first has been silent longest
            if len(self._clients) > MAX_CLIENTS:
                del self._clients[next(iter(self._clients))]
            self._changed.notify_all()

    def wait_until_end_was_read(self, max_seconds: float, *, on_all_ranks: bool = False) -> None:
        """Block until all clients that are expected to scrape again have read run_active 0.

        Args:
            max_seconds: The longest wait.
            on_all_ranks: Whether to wait for as long as the clients may take to read the other
                ranks too, which they do at other moments of the same interval.
        """
        with self._changed:
            if not on_all_ranks:
                patience = self.patience_seconds(max_seconds)
                self._changed.wait_for(lambda: not self._awaited(), patience)
                return
            if self._deadline is None:  # that this rank's end was read already does not matter
                self._deadline = time.monotonic() + _patience(self._regular(), max_seconds)
            self._changed.wait_for(lambda: False, max(0.0, self._deadline - time.monotonic()))

    def patience_seconds(self, max_seconds: float) -> float:
        """Return how long to wait for the expected scrapes; 0 if none is expected."""
        return _patience(self._awaited(), max_seconds)

    def _awaited(self) -> list[_Client]:
        """Return the clients that scrape regularly and have not read the end."""
        return [client for client in self._regular() if not client.end_was_read]

    def _regular(self) -> list[_Client]:
        now = self._now()
        return [client for client in self._clients.values() if client.is_regular(now)]


def _patience(clients: Iterable[_Client], max_seconds: float) -> float:
    """Return within how many seconds each of the clients should have scraped again."""
    intervals = (client.interval_seconds or 0.0 for client in clients)
    return min(max_seconds, INTERVALS_OF_PATIENCE * max(intervals, default=0.0))
