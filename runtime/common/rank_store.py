"""Where the ranks meet in the c10d store, which may outlive them.

torchrun keeps its store when it starts the processes anew, and what they left there earlier must
not be taken for news. The count of restarts does not tell: each node has its own. So rank 0 leaves
a token of its process where all can find it, and the others look again whether it has changed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

STORE_TIMEOUT_SECONDS = 10.0
# To connect anew, when the store has failed, may take the thread so long and a little more.
CONNECT_TIMEOUT_SECONDS = 2.0
# Rank 0's token is surely of an earlier life if it counts fewer restarts than this rank, as long as
# both are on one node. If they are not, this is what a rank loses by the mistake.
OLDER_TRUSTED_SECONDS = 10.0
_THIS_PROCESS = secrets.token_hex(4)


def common_store(store: Store, watch_index: int) -> Store:
    """Return the part of a store in which the token stands.

    Args:
        store: The job's store.
        watch_index: How many watches this process has had; the same on all ranks.
    """
    return PrefixStore(f"zerowatch/{watch_index}", store)


class StoreNamespace:
    """Names the place: by this rank's own token if it is rank 0, else by what rank 0 has left.

    Raises:
        RuntimeError: In any method, the store does not answer.
    """

    def __init__(self, rank: int, attempt: int, now: Callable[[], float] = time.monotonic) -> None:
        self._rank = rank
        self._attempt = attempt
        self._now = now
        self._since = now()

    def announce(self, store: Store) -> None:
        """As rank 0, tell the others where."""
        if self._rank == 0:
            store.set("token", self._own_token())

    def find(self, store: Store) -> str | None:
        """Return the prefix of all that the ranks leave each other; None while it is not known."""
        if self._rank == 0:
            return self._own_token()
        if not store.check(["token"]):
            return None
        token = store.get("token").decode()
        is_older = int(token.partition("-")[0]) < self._attempt
        is_early = self._now() - self._since < OLDER_TRUSTED_SECONDS
        return None if is_older and is_early else token

    def _own_token(self) -> str:
        return f"{self._attempt}-{_THIS_PROCESS}"


class StoreClientFactory:
    """Makes clients of the store for one thread, which shares the connection with no other.

    A slow answer then holds up nobody else.

    Args:
        rank: This rank.
        attempt: How often the launcher has restarted this node's processes.
        watch_index: How many watches this process has had; the same on all ranks.
        default: Gives the job's store.

    Raises:
        RuntimeError: In any method, the store does not answer.
    """

    def __init__(
        self,
        rank: int,
        attempt: int,
        watch_index: int,
        default: Callable[[], Store] = _get_default_store,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watch_index = watch_index
        self._default = default
        self._place = StoreNamespace(rank, attempt, now)
        self._client: Store | None = None
        self._token: str | None = None
        self._is_waiting = False  # with a client, for the token

    def connect(self) -> Store | None:
        """Connect anew to where the ranks meet; None while that is not known."""
        client = self._client if self._is_waiting else None
        self._is_waiting = False
        if client is None:
            client = self._client = self._new_client()
            self._place.announce(common_store(client, self._watch_index))
        store = common_store(client, self._watch_index)
        self._token = self._place.find(store)
        self._is_waiting = self._token is None
        return None if self._token is None else PrefixStore(self._token, store)

    def moved(self) -> bool:
        """Whether the ranks meet elsewhere by now."""
        if self._client is None or self._token is None:
            return False
        token = self._place.find(common_store(self._client, self._watch_index))
        return token not in (None, self._token)

    def _new_client(self) -> Store:
        """Clone the last client, as its timeout, unlike that of the job's store, is short."""
        if self._client is not None:
            self._client.set_timeout(timedelta(seconds=CONNECT_TIMEOUT_SECONDS))
        client: Store = (self._client or self._default()).clone()  # type: ignore[attr-defined]
        client.set_timeout(timedelta(seconds=STORE_TIMEOUT_SECONDS))
        return client
