"""Connections to stores that are there from the start."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from zerowatch.runtime.cross_rank.store_connection import StoreConnection


def connected(store: Store, now: Callable[[], float] = lambda: 0.0) -> StoreConnection:
    connection = StoreConnection(lambda: store, now)
    connection.open()
    return connection
