"""Exchanges texts between the threads of all ranks that write a checkpoint, through a c10d store.

The threads cannot use collectives: those of the training thread would have to wait for them.
"""

from __future__ import annotations

import secrets
import threading
from typing import Any, Protocol

from torch.distributed.distributed_c10d import _get_default_store

from ...common.host_group import HostCollectives
from ...common.rank_store import new_client, reconnectable

_POLL_SECONDS = 0.1
_STORE_TIMEOUT_SECONDS = 10.0
_MAX_NAMED = 8


class RankExchange(Protocol):
    """Exchanges texts between all ranks, on any thread. All ranks make the same calls in order."""

    def gather(self, text: str) -> list[str]:
        """Return every rank's text, by rank."""

    def stop(self) -> None:
        """End a wait for other ranks with an error."""


class StoreExchange:
    """Exchanges the texts of one save through a store; all ranks construct it at the same point.

    After an error it is not used again, because the ranks may then be at different calls.

    Args:
        host_group: Group of all ranks.
        store: A c10d store; None for the store of the job.
        previous: This rank's exchange of the save before, which no rank uses any more. Its keys
            are deleted.
    """

    def __init__(
        self,
        host_group: HostCollectives,
        store: Any = None,
        previous: StoreExchange | None = None,
    ) -> None:
        self._rank, self._world_size = host_group.rank, host_group.world_size
        self._stopped = threading.Event()
        self._phase = 0
        self._own_keys: list[str] = []
        self._outdated: list[str] = []
        self._store: Any = None
        self._client: Any = None
        if self._world_size > 1:
            # Not the save number: a save that failed has the same number as the next. And torchrun
            # keeps its store when it restarts the processes.
            self._prefix = f"zerowatch/saves/{host_group.broadcast_text(secrets.token_hex(8))}"
            self._store = _get_default_store() if store is None else store
            if previous is not None:
                self._outdated = previous._outdated + previous._own_keys

    def gather(self, text: str) -> list[str]:
        """Return every rank's text, by rank; wait for the slowest rank.

        A store whose host is gone may block this call without limit.

        Raises:
            RuntimeError: The store fails, or `stop` was called.
        """
        if self._world_size == 1:
            return [text]
        if self._client is None:  # of its own, because a call that blocks blocks its connection
            self._client = new_client(reconnectable(self._store), _STORE_TIMEOUT_SECONDS)
        while self._outdated:
            self._client.delete_key(self._outdated[-1])
            self._outdated.pop()
        keys = [f"{self._prefix}/{self._phase}/{rank}" for rank in range(self._world_size)]
        self._own_keys.append(keys[self._rank])
        self._client.set(keys[self._rank], text)
        while not self._client.check(keys):
            if self._stopped.wait(_POLL_SECONDS) and (missing := self._missing(keys)):
                raise RuntimeError(f"no response from rank {missing}")
        self._phase += 1
        return [self._client.get(key).decode() for key in keys]

    def stop(self) -> None:
        """End a wait for other ranks with an error."""
        self._stopped.set()

    def _missing(self, keys: list[str]) -> str:
        missing = [rank for rank, key in enumerate(keys) if not self._client.check([key])]
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        return ", ".join(map(str, missing[:_MAX_NAMED])) + more
