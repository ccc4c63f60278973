"""Exchanges texts between the threads of all ranks that write a checkpoint, through a c10d store.

The threads cannot use collectives: those of the training thread would have to wait for them.
"""

from __future__ import annotations

import secrets
import threading
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed.distributed_c10d import _get_default_store

from ...common.host_group import HostCollectives

_POLL_SECONDS = 0.1
_STORE_TIMEOUT_SECONDS = 10.0


class RankExchange(Protocol):
    """Exchanges texts between all ranks, on any thread. All ranks make the same calls in order."""

    def gather(self, text: str) -> list[str]:
        """Return every rank's text, by rank."""

    def stop(self) -> None:
        """End a wait for other ranks with an error."""


class StoreExchange:
    """Exchanges texts through a store; all ranks construct it at the same point.

    Args:
        host_group: Group of all ranks.
        store: A c10d store; None for the store of the job.
    """

    def __init__(self, host_group: HostCollectives, store: Any = None) -> None:
        self._rank, self._world_size = host_group.rank, host_group.world_size
        self._stopped = threading.Event()
        self._number = 0
        self._store: Any = None
        self._client: Any = None
        if self._world_size > 1:
            # torchrun keeps its store when it restarts the processes.
            token = host_group.broadcast_text(secrets.token_hex(8))
            self._prefix = f"zerowatch/saves/{token}"
            self._store = _get_default_store() if store is None else store

    def gather(self, text: str) -> list[str]:
        """Return every rank's text, by rank; wait for the slowest rank.

        Raises:
            RuntimeError: The store does not respond, or `stop` was called.
        """
        if self._world_size == 1:
            return [text]
        if self._client is None:
            self._client = self._store.clone()
            self._client.set_timeout(timedelta(seconds=_STORE_TIMEOUT_SECONDS))
        keys = [self._key(self._number, rank) for rank in range(self._world_size)]
        self._client.set(keys[self._rank], text)
        while not self._client.check(keys):
            if self._stopped.wait(_POLL_SECONDS):
                raise RuntimeError("other ranks have not written their files")
        texts = [self._client.get(key).decode() for key in keys]
        if self._number >= 1:  # all ranks have read it, because they have written the next
            self._client.delete_key(self._key(self._number - 1, self._rank))
        self._number += 1
        return texts

    def stop(self) -> None:
        """End a wait for other ranks with an error."""
        self._stopped.set()

    def _key(self, number: int, rank: int) -> str:
        return f"{self._prefix}/{number}/{rank}"
