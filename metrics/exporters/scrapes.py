"""The scrapes seen so far: whether a finished rank should wait for more, and for how long."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

RECENT_SECONDS = 60.0
INTERVALS_OF_PATIENCE = 1.2
# Enough gaps that two servers which cannot be told apart still show their interval.
REMEMBERED_SCRAPES = 5
MOST_CLIENTS = 16


@dataclass(slots=True)
class _Client:
    """One that scrapes: when it did last, and whether it has read that the run is over."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_SCRAPES))
    end_was_read: bool = False

    @property
    def comes_again(self) -> bool:
        return len(self.times) > 1

    def patience_seconds(self, most_seconds: float) -> float:
        if not self.comes_again:
            return most_seconds
        interval = max(later - earlier for earlier, later in pairwise(self.times))
        return min(most_seconds, INTERVALS_OF_PATIENCE * interval)


class Scrapes:
    """Times of the last scrapes by client, and which clients have read that the run is over.

    Each Prometheus must read it: one that did not would call the rank down. Somebody with a browser
    who looks at that very moment is not who must.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._clients: dict[str, _Client] = {}
        self._changed = threading.Condition()

    def note(self, client: str, *, run_active: float | None) -> None:
        """Remember a scrape that `client` has just been answered, with this value of run_active."""
        with self._changed:
            seen = self._clients.pop(client, None) or _Client()
            seen.times.append(self._clock())
            seen.end_was_read = run_active == 0
            self._clients[client] = seen  # at the end: the first is who was silent longest
            if len(self._clients) > MOST_CLIENTS:
                del self._clients[next(iter(self._clients))]
            self._changed.notify_all()

    def wait_until_end_was_read(self, most_seconds: float) -> None:
        """Block until all have read run_active 0 of whom another scrape can be expected."""
        with self._changed:
            patience = self.patience_seconds(most_seconds)
            self._changed.wait_for(lambda: not self._awaited(), patience)

    def patience_seconds(self, most_seconds: float) -> float:
        """Return how long the scrapes awaited may take to come; 0 if there are none."""
        awaited = self._awaited()
        return max((client.patience_seconds(most_seconds) for client in awaited), default=0.0)

    def _awaited(self) -> list[_Client]:
        """Those who scraped of late and have not read the end; of them, who come again and again.

        Only if nobody does, somebody who came once: Prometheus may just have begun.
        """
        now = self._clock()
        recent = [
            client for client in self._clients.values() if now - client.times[-1] <= RECENT_SECONDS
        ]
        regular = [client for client in recent if client.comes_again]
        return [client for client in regular or recent if not client.end_was_read]
