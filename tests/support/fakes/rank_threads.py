"""Ranks as threads of one process, which exchange numbers at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

T = TypeVar("T")
PATIENCE_SECONDS = 120.0  # only ends a test that hangs


class FakeHostGroup:
    """Host group of one rank among threads."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.world_size = rank, meeting.world_size
        self._meeting = meeting
        self.is_closed = False

    def all_gather(self, values: Sequence[float]) -> np.ndarray:
        return np.array(self._meeting.exchange(self.rank, list(values)), dtype=float)

    def all_gather_text(self, text: str, num_bytes: int | None = None) -> list[str]:
        assert num_bytes is None or len(text.encode()) <= num_bytes
        return self._meeting.exchange(self.rank, text)

    def all_max(self, value: int) -> int:
        return max(self._meeting.exchange(self.rank, value))

    def broadcast_text(self, text: str) -> str:
        return self._meeting.exchange(self.rank, text)[0]

    def close(self) -> None:
        self.is_closed = True


class Meeting:
    """All-gather between threads; a rank that waits in vain raises BrokenBarrierError."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._values: list = [None] * world_size
        self._barrier = threading.Barrier(world_size, timeout=PATIENCE_SECONDS)

    def exchange(self, rank: int, value: object) -> list:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


def on_ranks(world_size: int, body: Callable[[FakeHostGroup], T]) -> list[T]:
    """Run `body` on all ranks concurrently; return the results by rank."""
    meeting = Meeting(world_size)
    with ThreadPoolExecutor(world_size) as threads:
        ranks = [FakeHostGroup(rank, meeting) for rank in range(world_size)]
        return list(threads.map(body, ranks))
