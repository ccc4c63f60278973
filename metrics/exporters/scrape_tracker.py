"""Tracks the scrapes of each client. A rank that ends uses them to wait for the last scrape."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

INTERVALS_OF_PATIENCE = 1.2
# A client that has not scraped for this many of its intervals is gone. No rank waits for it.
INTERVALS_UNTIL_GONE = 3
# The scrape interval of a Prometheus server until its scrapes show it. Few are longer.
ASSUMED_INTERVAL_SECONDS = 60.0
# Two Prometheus servers with one configuration look like one client if they scrape from one
# address, such as behind a proxy. The gaps between this many scrapes show that: they alternate.
REMEMBERED_SCRAPES = 5
# Largest difference between the gaps of one server, as a share of two of them.
JITTER_RATIO = 0.02
# The gaps alternate if they differ by this many times more than the sums of two of them.
ALTERNATION = 4
MAX_CLIENTS = 16


@dataclass(slots=True)
class _Client:
    """The times of a client's last scrapes, and whether the client has read the end of the run.

    Attributes:
        timeout_seconds: The scrape timeout that a Prometheus server sends. None for other clients.
        num_servers: 2 if two servers with the same interval look like this client, else 1.
    """

    timeout_seconds: float | None = None
    times: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_SCRAPES))
    num_servers: int = 1
    _num_reads_of_end: int = 0

    def add(self, at: float, *, is_end: bool) -> None:
        """Add a scrape. Irregular ones, such as late ones, do not change the number of servers."""
        self.times.append(at)
        self._num_reads_of_end = self._num_reads_of_end + 1 if is_end else 0
        gaps, sums = self._gaps(1), self._gaps(2)
        if len(sums) > 1:
            difference = max(gaps) - min(gaps)
            if difference <= JITTER_RATIO * max(sums):
                self.num_servers = 1
            elif difference > ALTERNATION * (max(sums) - min(sums)):
                self.num_servers = 2

    @property
    def end_was_read(self) -> bool:
        """Whether the client has read the end of the run: of two servers, each one."""
        return self._num_reads_of_end >= self.num_servers

    def has_scraped_after(self, at: float) -> bool:
        """Whether the client has scraped since then: of two servers, each one."""
        return self.times[-self.num_servers] > at

    @property
    def interval_seconds(self) -> float | None:
        """The longest interval between the last scrapes of a server.

        A Prometheus server scrapes again, so until its interval is known, one is assumed. Another
        client has none after a single request.
        """
        longest = max(self._gaps(self.num_servers), default=None)
        if self.timeout_seconds is None:
            return longest
        # An interval is at least the timeout. Clearly shorter gaps are those between the first
        # scrapes of two servers that look like one client.
        if longest is None or longest < self.timeout_seconds / 2:
            return ASSUMED_INTERVAL_SECONDS
        return longest

    def _gaps(self, num_scrapes: int) -> list[float]:
        """Return the seconds from each scrape to the one that comes so many scrapes later."""
        later = islice(self.times, num_scrapes, None)
        return [end - begin for begin, end in zip(self.times, later, strict=False)]

    def is_regular(self, now: float) -> bool:
        """Whether the client scrapes at intervals and has not stopped."""
        interval = self.interval_seconds
        return interval is not None and now - self.times[-1] <= INTERVALS_UNTIL_GONE * interval


class ScrapeTracker:
    """Records the last scrapes of each client, and whether the client has read the end of the run.

    If a Prometheus server does not read that the run is over, it reports the rank as down. A rank
    therefore waits at the end of a run for all clients that scrape regularly. Prometheus, which is
    recognized by its scrape timeout, counts as regular from its first scrape on: a short run may
    not get a second one. A single request of another client, such as a browser, neither starts,
    ends nor extends the wait.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._clients: dict[str, _Client] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        # The first call of `wait_until_end_was_read`, and the clients of that moment.
        self._ended_at: float | None = None
        self._clients_at_end: list[_Client] = []
        self._deadline = math.inf
        self._asked_at: float | None = None  # the first call of `wait_until_read`

    def note(
        self, client: str, *, run_active: float | None, timeout_seconds: float | None = None
    ) -> None:
        """Record a scrape by `client`.

        Args:
            client: The name of the client, the same in all of its scrapes.
            run_active: The value of run_active in the response.
            timeout_seconds: The timeout that a Prometheus server sends. None for other clients.
        """
        with self._changed:
            seen = self._clients.pop(client, None) or _Client(timeout_seconds=timeout_seconds)
            seen.add(self._now(), is_end=run_active == 0)
            self._clients[client] = seen  # moved to the end: the first client is silent longest
            if len(self._clients) > MAX_CLIENTS:
                del self._clients[next(iter(self._clients))]
            self._changed.notify_all()

    def close(self) -> None:
        """End all waits, now and later, because no scrape can come any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def wait_until_end_was_read(
        self, max_seconds: float, *, on_all_ranks: bool = False, returns_after: float = math.inf
    ) -> float:
        """Block until all clients that are expected to scrape again have read run_active 0.

        They are expected within their intervals since the first call.

        Args:
            max_seconds: The longest wait.
            on_all_ranks: Whether to wait until the clients have had time to read the other ranks,
                too. A client scrapes each rank at another moment of the same interval.
            returns_after: Seconds after which the call returns in any case. The caller may log that
                the wait is long, and call again.

        Returns:
            The most seconds that are left to wait; 0 if the wait is over.
        """
        with self._changed:
            began = time.monotonic()
            if self._ended_at is None:  # includes clients that have read the end of this rank
                self._clients_at_end = self._regular()
                self._ended_at = began
            latest = began + max_seconds
            while (left := self._seconds_left(self._ended_at, latest, on_all_ranks)) > 0:
                until_return = began + returns_after - time.monotonic()
                if until_return <= 0:
                    return left
                self._changed.wait(min(left, until_return))
            return 0.0

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
                return [each for each in self._regular() if not each.has_scraped_after(asked_at)]

            patience = _patience(awaited(), max_seconds) - (self._now() - asked_at)
            self._changed.wait_for(lambda: self._is_closed or not awaited(), max(0.0, patience))

    def patience_seconds(self, max_seconds: float) -> float:
        """Return the seconds to wait for the expected scrapes, or 0 if no scrape is expected."""
        with self._changed:  # another thread may record a scrape
            return _patience(self._awaited(), max_seconds)

    def _seconds_left(self, ended_at: float, latest: float, on_all_ranks: bool) -> float:
        """Return how long the clients may still need for their scrapes of this rank, or of all."""
        if self._is_closed:
            return 0.0
        if not on_all_ranks:
            return min(latest, ended_at + self.patience_seconds(math.inf)) - time.monotonic()
        # The next scrape may show an interval that is shorter than the assumed one.
        patience = _patience(self._clients_at_end, math.inf)
        self._deadline = min(self._deadline, latest, ended_at + patience)
        return self._deadline - time.monotonic()

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
