"""Provides a connection to the c10d store that reopens after a failure, and logs in the store.

No function of this module waits for another rank. Reading an absent key would wait, so the code
first checks that the key is present.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import Store

from ....metrics.backoff import Backoff
from ...common.rank_store import StoreClientFactory, without_prefixes

# Delay before the first retry after a failure. The delay doubles with each failure.
FIRST_RETRY_SECONDS = 30.0
MAX_RETRY_SECONDS = 300.0
# Number of entries of a log that are kept. Older entries are deleted, so a TCPStore does not grow.
MAX_ENTRIES = 16
# Longest time between two polls of a log that counts in full, as a part of the reader's patience.
LONGEST_GAP = 0.5


class StoreConnection:
    """Connects one thread to the store. Only `set_timeout` may be called from other threads.

    Args:
        clients: Creates clients.
        now: A monotonic clock, in seconds.

    Attributes:
        now: The clock. The logs over this connection use the same clock.
        opened_at: The time of the last `open`. Before the first `open`, the time of construction.

    Raises:
        RuntimeError: The store does not respond. Every method except `mark_failed`, `close` and
            `set_timeout` may raise this error.
    """

    def __init__(
        self, clients: StoreClientFactory, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.now = now
        self.opened_at = now()
        self._clients = clients
        self._client: Store | None = None
        self._backoff = Backoff(FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS, now)

    @property
    def is_open(self) -> bool:
        """Whether the connection has a client that has not failed."""
        return self._client is not None

    @property
    def only_grows(self) -> bool:
        """Whether each write makes the open store larger, though keys are replaced or deleted."""
        return isinstance(without_prefixes(self._client), c10d.FileStore)

    def open(self) -> None:
        """Connect, unless a client is open.

        Does nothing until the delay after a failure is over, or if the store's address is unknown.
        """
        if self._client is None and self._backoff.is_due:
            self._client = self._clients.connect()
            self.opened_at = self.opened_at if self._client is None else self.now()

    def has_moved(self) -> bool:
        """Whether the ranks have changed to another namespace of the store."""
        return self._clients.moved()

    def mark_failed(self) -> None:
        """Drop the client. `open` connects again after a delay."""
        if self.is_open and self.now() - self.opened_at > MAX_RETRY_SECONDS:
            self._backoff.reset()
        self._client = None
        self._backoff.start_delay()

    def close(self) -> None:
        """Drop the client. `open` may connect again at once."""
        self._client = None

    def close_for_good(self) -> None:
        """Drop the client and close its network connection. It must not be opened again."""
        self._client = None
        self._clients.close()

    def set_timeout(self, timeout_seconds: float) -> None:
        """Limit the time that calls wait for a response. May be called on any thread."""
        client = self._client
        if client is not None:
            client.set_timeout(timedelta(seconds=timeout_seconds))

    def check(self, keys: list[str]) -> bool:
        """Whether all of the keys are present."""
        return self._store().check(keys)

    def get(self, key: str) -> bytes:
        """Return the value of a key that is present."""
        return self._store().get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys that are present."""
        return self._store().multi_get(keys)

    def set(self, key: str, value: bytes | str) -> None:
        """Write a value."""
        # The bindings take bytes, contrary to their type stub.
        self._store().set(key, value)  # type: ignore[arg-type]

    def delete_key(self, key: str) -> None:
        """Delete a key."""
        self._store().delete_key(key)

    def _store(self) -> Store:
        if self._client is None:
            raise RuntimeError("there is no connection to the c10d store")
        return self._client


def excused_seconds(gap_seconds: float, patience_seconds: float) -> float:
    """Return how much of the time between two polls does not count against other ranks.

    After a long time, such as a suspension of the job, it is unknown whether they were silent. A
    part of it counts nevertheless, so that a reader that is always late still finds a lost rank.
    """
    longest_seconds = LONGEST_GAP * patience_seconds
    return gap_seconds - longest_seconds / 2 if gap_seconds > longest_seconds else 0.0


class StoreLogWriter:
    """Appends to a log in the store, which other ranks read.

    Raises:
        RuntimeError: The store does not respond; raised by every method.
    """

    def __init__(self, store: StoreConnection, name: str) -> None:
        self._store = store
        self._name = name
        self._next = 0
        self._last_append = store.now()

    def append(self, entry: bytes) -> None:
        """Append an entry, and delete one that is too old."""
        number = self._next
        self._store.set(f"{self._name}/{number}", entry)
        self._next += 1  # also if the store fails now, because the entry may have been read
        self._store.set(f"{self._name}/latest", str(number))
        if number >= MAX_ENTRIES:
            self._store.delete_key(f"{self._name}/{number - MAX_ENTRIES}")
        self._last_append = self._store.now()

    def silent_seconds(self) -> float:
        """Return the seconds since the last entry was appended."""
        return self._store.now() - self._last_append


class StoreLogReader:
    """Reads each entry of another rank's log once, in order.

    Attributes:
        has_entries: Whether an entry was ever read.

    Raises:
        RuntimeError: The store does not respond; raised by every method.
    """

    def __init__(self, store: StoreConnection, name: str) -> None:
        self._store = store
        self._name = name
        self._next = 0
        self._last_read = self._last_caught_up = store.now()
        self._last_poll = self._silent_since = store.now()
        self.has_entries = False

    def poll(self, patience_seconds: float) -> Iterator[bytes]:
        """Yield the new entries.

        If there was no new entry for `patience_seconds`, skip to the latest entry. The entries in
        between may have been deleted while this rank paused.
        """
        gap_seconds = self._store.now() - self._last_poll
        self._last_poll = self._store.now()
        self._silent_since += excused_seconds(gap_seconds, patience_seconds)
        yield from self._read_new()
        if self._seconds_since(self._last_read) > patience_seconds:
            self._catch_up(patience_seconds)
            yield from self._read_new()

    def silent_seconds(self) -> float:
        """Return the seconds since the last entry was read, or since the store was last opened.

        Of a long time in which this rank itself did not poll, most does not count.
        """
        return self._seconds_since(self._silent_since)

    def _seconds_since(self, seconds: float) -> float:
        return self._store.now() - max(seconds, self._store.opened_at)

    def _read_new(self) -> Iterator[bytes]:
        while self._store.check([key := f"{self._name}/{self._next}"]):
            entry = self._store.get(key)
            self._next += 1
            self.has_entries = True
            self._last_read = self._last_caught_up = self._silent_since = self._store.now()
            yield entry

    def _catch_up(self, after_seconds: float) -> None:
        if self._store.now() - self._last_caught_up < after_seconds:
            return
        self._last_caught_up = self._store.now()
        if self._store.check([key := f"{self._name}/latest"]):
            self._next = max(self._next, int(self._store.get(key)))
