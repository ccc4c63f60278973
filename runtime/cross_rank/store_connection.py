"""The way to the c10d store: a client that is made anew some time after it failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from ...metrics.backoff import Backoff

FIRST_PAUSE_SECONDS = 30.0
LONGEST_PAUSE_SECONDS = 300.0


class StoreConnection:
    """Used on one thread, but for `hurry`.

    Args:
        connect: Makes a client; None while it is not known yet where the ranks meet.

    Attributes:
        since: When it was opened last; before that, when it was made.

    Raises:
        RuntimeError: In any method but `lose`, `leave` and `hurry`, the store does not answer.
    """

    def __init__(
        self, connect: Callable[[], Store | None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._connect = connect
        self._now = now
        self._client: Store | None = None
        self.since = now()
        self._backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, now)

    @property
    def is_open(self) -> bool:
        """Whether there is a client that has not failed."""
        return self._client is not None

    def open(self) -> None:
        """Connect, unless that is done, or it failed a short while ago."""
        if self._client is None and self._backoff.is_due:
            self._client = self._connect()
            self.since = self.since if self._client is None else self._now()

    def lose(self) -> None:
        """Give the client up, as it failed."""
        if self.is_open and self._now() - self.since > LONGEST_PAUSE_SECONDS:
            self._backoff.reset()
        self._client = None
        self._backoff.wait()

    def leave(self) -> None:
        """Give the client up, as the ranks meet elsewhere."""
        self._client = None

    def set_timeout(self, timeout_seconds: float) -> None:
        """Wait no longer than that for an answer from now on. May be called on any thread."""
        client = self._client
        if client is not None:
            client.set_timeout(timedelta(seconds=timeout_seconds))

    def check(self, keys: list[str]) -> bool:
        """Whether all of the keys are there."""
        return self._store().check(keys)

    def get(self, key: str) -> bytes:
        """Return the text of a key that is there."""
        return self._store().get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the texts of keys that are there."""
        return self._store().multi_get(keys)

    def set(self, key: str, text: bytes | str) -> None:
        """Leave a text."""
        # The bindings take bytes, which their type stub does not say.
        self._store().set(key, text)  # type: ignore[arg-type]

    def delete_key(self, key: str) -> None:
        """Take a text away."""
        self._store().delete_key(key)

    def _store(self) -> Store:
        if self._client is None:
            raise RuntimeError("there is no connection to the c10d store")
        return self._client
