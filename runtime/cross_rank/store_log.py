"""Rows of texts in the c10d store, written by one rank and read by others. Never waits.

Asking for a key that is not there would block, so each is checked first. What has been read is
deleted by its writer some texts later, so that the store does not grow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from .store_connection import StoreConnection

KEPT_TEXTS = 16


class StoreLogWriter:
    """One rank's row of texts.

    Raises:
        RuntimeError: In any method, the store does not answer.
    """

    def __init__(
        self, store: StoreConnection, name: str, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._name = name
        self._next = 0
        self._now = now
        self._last_posted = now()

    def post(self, text: bytes) -> None:
        """Leave the next text."""
        number = self._next
        self._store.set(f"{self._name}/{number}", text)
        self._next += 1  # also if the store fails now: that text may have been read
        self._store.set(f"{self._name}/latest", str(number))
        if number >= KEPT_TEXTS:
            self._store.delete_key(f"{self._name}/{number - KEPT_TEXTS}")
        self._last_posted = self._now()

    def silent_seconds(self) -> float:
        """Return for how long nothing was posted."""
        return self._now() - self._last_posted


class StoreLogReader:
    """What another rank has written, in order, as far as this rank has not read it.

    Attributes:
        has_heard: Whether there ever was anything.

    Raises:
        RuntimeError: In any method, the store does not answer.
    """

    def __init__(
        self, store: StoreConnection, name: str, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._name = name
        self._next = 0
        self._now = now
        self._last_read = self._last_looked = now()
        self.has_heard = False

    def take(self, patience_seconds: float) -> Iterator[bytes]:
        """Give the texts that are there.

        Where there was none for so long, this rank itself may have been away while texts came and
        went: then it goes on with the latest one.
        """
        yield from self._take_next()
        if self.silent_seconds() > patience_seconds:
            self._catch_up(patience_seconds)
            yield from self._take_next()

    def _take_next(self) -> Iterator[bytes]:
        while self._store.check([key := f"{self._name}/{self._next}"]):
            text = self._store.get(key)
            self._next += 1
            self.has_heard = True
            self._last_read = self._last_looked = self._now()
            yield text

    def silent_seconds(self) -> float:
        """Return for how long there was nothing to read, while the store answered."""
        return self._now() - max(self._last_read, self._store.since)

    def _catch_up(self, after_seconds: float) -> None:
        if self._now() - self._last_looked < after_seconds:
            return
        self._last_looked = self._now()
        if self._store.check([key := f"{self._name}/latest"]):
            self._next = max(self._next, int(self._store.get(key)))
