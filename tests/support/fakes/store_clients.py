"""Clients of a c10d store; tests pass them instead of a `StoreClientFactory`."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from zerowatch.runtime.cross_rank.exchange.store_log import StoreConnection


class FakeClients:
    """Fake store clients; `has_moved` simulates a move of the ranks to another store."""

    def __init__(self, connect: Callable[[], Store | None]) -> None:
        self.connect = connect
        self.has_moved = False

    def moved(self) -> bool:
        """Return whether the ranks have moved, once."""
        moved, self.has_moved = self.has_moved, False
        return moved

    def close(self) -> None:
        """Do nothing: the store is the test's."""


def connected(store: Store, now: Callable[[], float] = lambda: 0.0) -> StoreConnection:
    """Return an open connection to a store."""
    connection = StoreConnection(FakeClients(lambda: store), now)
    connection.open()
    return connection
