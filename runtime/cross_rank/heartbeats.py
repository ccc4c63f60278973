"""Signs of life: each rank leaves one in the store, read only when training does not move.

Clocks of two hosts may differ, so a sign of life holds a count, and its age is how long the reader
has seen that count stand still.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from .coordinator import BLOCK_SIZE
from .store_connection import StoreConnection

MOST_PEERS = 1024
# A rank that hangs says so again at each look; what is older is of a hang that is over.
NOTICE_SECONDS = 15.0
SECONDS_BETWEEN_READINGS = 5.0
READINGS_PER_WAIT = 4  # in as long as training has stood still before anything is read
READINGS_TO_BELIEVE = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A rank's last sign of life, and the last call it issued, by the rank set's key.

    `age_seconds` is how long it was seen to stand still, None if it was read only once. `pause`
    says why the rank may lawfully stand still, None while it trains.
    """

    rank: int
    host: str
    age_seconds: float | None
    arrived: Mapping[str, int]
    pause: str | None


class HeartbeatTable:
    """Leaves this rank's signs of life, and reads the others'.

    Above 64 ranks the first of each block of 64 gathers those of its block into one text, as all
    ranks read at the same time: when training stands still.

    Args:
        store: The store.
        rank: This rank.
        host: This rank's host.
        stuck_seconds: How long training stands still before signs of life are read.

    Attributes:
        beats: The others' last signs of life, by rank, as of the last reading.
        others_hang: Whether another rank had told at the last look that it hangs.

    Raises:
        RuntimeError: In any method but `forget`, the store does not answer.
    """

    beats: dict[int, Heartbeat]
    others_hang: bool
    _due: float | None
    _seen: dict[str, tuple[int, float]]  # counts, and when they were first seen
    _notice: bytes | None
    _noticed_at: float | None

    def __init__(
        self,
        store: StoreConnection,
        rank: int,
        host: str,
        stuck_seconds: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._rank = rank
        self._host = host
        self._now = now
        self._leads = rank % BLOCK_SIZE == 0
        self._count = 0  # of all that was left here
        self._pause_seconds = min(SECONDS_BETWEEN_READINGS, stuck_seconds / READINGS_PER_WAIT)
        self.forget()

    def beat(self, arrived: Mapping[str, int], pause: str | None) -> None:
        """Leave a sign of life."""
        told = {"host": self._host, "arrived": dict(arrived), "pause": pause}
        self._store.set(f"beat/{self._rank}", orjson.dumps(told | {"count": self._next_count()}))

    def tell_of_hang(self) -> None:
        """Tell the others that this rank hangs."""
        self._store.set("hang", f"{self._rank} {self._next_count()}")

    def look(self, ranks: Iterable[int], *, is_stuck: bool) -> None:
        """Look who hangs and, now and then, for the signs of life of some ranks.

        Args:
            ranks: All that share a rank set with this rank.
            is_stuck: Whether training has stood still for `stuck_seconds`. If not, only a rank that
                was told of a hang wants to know more.
        """
        told_of_hang = self._is_told_of_hang()
        if is_stuck or told_of_hang:
            if self._due is None:  # not all at once, and those first for whom the others wait
                early = 0.0 if self._leads or told_of_hang else random.uniform(0.5, 1.0)
                self._due = self._now() + early * self._pause_seconds
            if self._now() >= self._due:
                self._due = self._now() + random.uniform(1.0, 1.5) * self._pause_seconds
                told = self._read(sorted(ranks)[:MOST_PEERS])
                self.beats = {rank: self._beat(rank, each) for rank, each in told.items()}
        self.others_hang = told_of_hang  # last: who sees it wants to read the rest

    def forget(self) -> None:
        """Forget what was read, as training moves: what is read later must be seen anew."""
        self.beats, self.others_hang = {}, False
        self._due, self._seen = None, {}
        self._notice = self._noticed_at = None

    def _next_count(self) -> int:
        self._count += 1
        return self._count

    def _is_told_of_hang(self) -> bool:
        if not self._store.check(["hang"]):
            return False
        notice = self._store.get("hang")
        if int(notice.split()[0]) == self._rank:
            return False
        if self._notice not in (None, notice):
            self._noticed_at = self._now()
        self._notice = notice
        return self._noticed_at is not None and self._now() - self._noticed_at < NOTICE_SECONDS

    def _read(self, ranks: Sequence[int]) -> dict[int, Any]:
        """Return what ranks have told: block by block, and one by one where a block is silent."""
        if len(ranks) <= BLOCK_SIZE:
            return self._read_each(ranks)
        told = self._read_digests(ranks)
        if self._leads:
            own = self._read_each(range(self._rank, self._rank + BLOCK_SIZE))
            for rank, each in own.items():
                each["age"] = self._age(f"beat/{rank}", each["count"])
            digest = orjson.dumps([self._next_count(), list(own.items())])
            self._store.set(f"beats/{_block(self._rank)}", zlib.compress(digest, 1))
            told |= own
        told |= self._read_each([rank for rank in ranks if rank not in told])
        return {rank: told[rank] for rank in ranks if told.get(rank) is not None}

    def _read_each(self, ranks: Sequence[int]) -> dict[int, Any]:
        texts = self._texts([f"beat/{rank}" for rank in ranks])
        return {int(key.partition("/")[2]): orjson.loads(text) for key, text in texts.items()}

    def _read_digests(self, ranks: Sequence[int]) -> dict[int, Any]:
        """Return what the firsts of the other blocks have gathered; None of a rank is nothing yet.

        A digest that stands still is not believed: its writer may be the one that is stuck.
        """
        told: dict[int, Any] = {}
        blocks = {_block(rank) for rank in ranks}
        if self._leads:
            blocks.discard(_block(self._rank))
        keys = {block: f"beats/{block}" for block in sorted(blocks)}
        texts = self._texts(list(keys.values()))
        for block, key in keys.items():
            count, beats = orjson.loads(zlib.decompress(texts[key])) if key in texts else (0, [])
            if (self._age(key, count) or 0.0) < READINGS_TO_BELIEVE * self._pause_seconds:
                told |= dict.fromkeys(rank for rank in ranks if _block(rank) == block)
                told |= dict(beats)
        return told

    def _texts(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return what is there of some keys."""
        present = self._present(keys)
        return dict(zip(present, self._store.multi_get(present), strict=True)) if present else {}

    def _present(self, keys: Sequence[str]) -> list[str]:
        """Find the keys that are there, with one question if all are."""
        if not keys or self._store.check(list(keys)):
            return list(keys)
        half = len(keys) // 2
        return [*self._present(keys[:half]), *self._present(keys[half:])] if half else []

    def _age(self, key: str, count: int) -> float | None:
        """Return for how long a count was seen to stand still; None at the first sight of it."""
        known = self._seen.get(key)
        if known is None or known[0] != count:
            self._seen[key] = (count, self._now())
            return None if known is None else 0.0
        return self._now() - known[1]

    def _beat(self, rank: int, told: Mapping[str, Any]) -> Heartbeat:
        seen = self._age(f"beat/{rank}", told["count"])
        return Heartbeat(
            rank=rank,
            host=told["host"],
            # As the writer of a digest saw it: the reader may see one digest twice.
            age_seconds=told.get("age", seen),
            arrived=told["arrived"],
            pause=told["pause"],
        )


def _block(rank: int) -> int:
    return rank // BLOCK_SIZE
