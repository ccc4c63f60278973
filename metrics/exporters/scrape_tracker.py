"""Tracks the scrapes of each client. A rank that ends uses them to wait for the last scrape."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

INTERVALS_OF_PATIENCE = 1.2
# A client that has not scraped for this many of its intervals is gone. No rank waits for it.
INTERVALS_UNTIL_GONE = 3
# Two Prometheus servers may look like one client. The gaps between this many scrapes still show the
# scrape interval.
REMEMBERED_SCRAPES = 5
MAX_CLIENTS = 16


@dataclass(slots=True)
class _Client:
    """The times of a client's last scrapes, and whether the client has read the end of the run."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_SCRAPES))
    end_was_read: bool = False

    @property
    def interval_seconds(self) -> float | None:
        """The longest interval between the last scrapes. None after a single scrape."""
        return max((later - earlier for earlier, later in pairwise(self.times)), default=None)

    def is_regular(self, now: float) -> bool:
        """Whether the client scrapes at intervals and has not stopped."""
        interval = self.interval_seconds
        return interval is not None and now - self.times[-1] <= INTERVALS_UNTIL_GONE * interval


class ScrapeTracker:
    """Records the last scrapes of each client, and whether the client has read the end of the run.

    If a Prometheus server does not read that the run is over, it reports the rank as down. A rank
    therefore waits at the end of a run for all clients that scrape regularly. A single request,
    such as from a browser, neither starts, ends nor extends the wait.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._clients: dict[str, _Client] = {}
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._asked_at: float | None = None  # the first call of `wait_until_read`

    def note(self, client: str, *, run_active: float | None) -> None:
        """Record a scrape by `client`. The response contained this value of run_active."""
        with self._changed:
            seen = self._clients.pop(client, None) or _Client()
            seen.times.append(self._now())
            seen.end_was_read = run_active == 0
            self._clients[client] = seen  # moved to the end: the first client is silent longest
            if len(self._clients) > MAX_CLIENTS:
                del self._clients[next(iter(self._clients))]
            self._changed.notify_all()

    def wait_until_end_was_read(self, max_seconds: float, *, on_all_ranks: bool = False) -> None:
        """Block until all clients that are expected to scrape again have read run_active 0.

        Args:
            max_seconds: The longest wait.
            on_all_ranks: Whether to wait until the clients have had time to read the other ranks,
                too. A client scrapes each rank at another moment of the same interval.
        """
        with self._changed:
            if not on_all_ranks:
                patience = self.patience_seconds(max_seconds)
                self._changed.wait_for(lambda: not self._awaited(), patience)
                return
            if self._deadline is None:  # includes clients that have read the end of this rank
                self._deadline = time.monotonic() + _patience(self._regular(), max_seconds)
            self._changed.wait_for(lambda: False, max(0.0, self._deadline - time.monotonic()))

    def wait_until_read(self, max_seconds: float) -> None:
        """Block until all clients that scrape regularly have scraped since the first call.

        Args:
            max_seconds: The longest wait since the first call.
        """
        with self._changed:
            if self._asked_at is None:
                self._asked_at = self._now()
            asked_at = self._asked_at

            def awaited() -> list[_Client]:
                return [client for client in self._regular() if client.times[-1] <= asked_at]

            patience = _patience(awaited(), max_seconds) - (self._now() - asked_at)
            self._changed.wait_for(lambda: not awaited(), max(0.0, patience))

    def patience_seconds(self, max_seconds: float) -> float:
        """Return the seconds to wait for the expected scrapes, or 0 if no scrape is expected."""
        return _patience(self._awaited(), max_seconds)

    def _awaited(self) -> list[_Client]:
        """Return the clients that scrape regularly and have not read the end of the run."""
        return [client for client in self._regular() if not client.end_was_read]

    def _regular(self) -> list[_Client]:
        now = self._now()
        return [client for client in self._clients.values() if client.is_regular(now)]


def _patience(clients: Iterable[_Client], max_seconds: float) -> float:
    """Return the number of seconds within which all of the clients should scrape again."""
    intervals = (client.interval_seconds or 0.0 for client in clients)
    return min(max_seconds, INTERVALS_OF_PATIENCE * max(intervals, default=0.0))
