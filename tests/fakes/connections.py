"""Connections to stores that are there from the start."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from zerowatch.runtime.cross_rank.store_connection import Connection


def connected(store: Store, now: Callable[[], float] = lambda: 0.0) -> Connection:
    connection = Connection(lambda: store, now)
    connection.open()
    return connection
