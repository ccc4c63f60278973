"""Writes this rank's heartbeats to the store, and reads other ranks' while training is stuck.

The clocks of two hosts may differ, so a heartbeat contains a count instead of a time. Its age is
the time for which the reader has seen the same count.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

import orjson

from .coordinator import BLOCK_SIZE
from .rank_messages import Heartbeat
from .store_log import StoreConnection

# Maximum number of heartbeats that a rank reads one by one, because no digest contains them.
MAX_SINGLE_READS = 1024
# A rank that hangs repeats its announcement at each poll. If an announcement is older than this,
# the hang has ended.
ANNOUNCEMENT_SECONDS = 15.0
READ_INTERVAL_SECONDS = 5.0
# Minimum number of reads in the time after which a rank counts as stuck.
READS_PER_STUCK_TIME = 4
# A digest that has not changed for this many read intervals is ignored.
MAX_DIGEST_AGE_READS = 3.0


class HeartbeatTable:
    """Writes this rank's heartbeats and reads the heartbeats of other ranks.

    All ranks read at the same time, because training is stuck on all of them. In a job of more than
    64 ranks, the first rank of each block of 64 therefore gathers the heartbeats of its block into
    one digest.

    Args:
        store: The connection.
        rank: This rank.
        host: This rank's host.
        stuck_seconds: Time without progress after which the rank reads heartbeats.
        delays: Draws the times of the reads. By default, the ranks draw different times, and the
            script's generators are not used.

    Attributes:
        heartbeats: The heartbeats by rank, as of the last read.
        others_hang: Whether another rank had announced a hang at the last poll.

    Raises:
        RuntimeError: The store does not respond; raised by every method.
    """

    heartbeats: dict[int, Heartbeat]
    others_hang: bool
    _read_at: float | None  # time of the next read
    _seen: dict[str, tuple[int, float]]  # counts by key, and when they were first seen
    _announcement: bytes | None
    _announced_at: float | None

    def __init__(
        self,
        store: StoreConnection,
        rank: int,
        host: str,
        stuck_seconds: float,
        delays: Random | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._host = host
        self._delays = delays or Random()
        self._is_first_of_block = rank % BLOCK_SIZE == 0
        self._has_digest = False  # of its block, in the store
        self._count = 0  # number of heartbeats, digests and announcements written
        self._interval_seconds = min(READ_INTERVAL_SECONDS, stuck_seconds / READS_PER_STUCK_TIME)
        self.clear()

    def post(
        self,
        issued: Mapping[str, int],
        pause: str | None,
        step: int = 0,
        unseen: Mapping[str, int] | None = None,
        interval_seconds: float = 0.0,
    ) -> None:
        """Write a heartbeat. The arguments are attributes of a `Heartbeat`."""
        fields = {
            "host": self._host,
            "arrived": dict(issued),
            "pause": pause,
            "step": step,
            "unseen": dict(unseen or {}),
            "interval": interval_seconds,
            "count": self._next_count(),
        }
        self._store.set(f"beat/{self._rank}", orjson.dumps(fields))

    def announce_hang(self) -> None:
        """Announce to the other ranks that this rank hangs."""
        self._store.set("hang", f"{self._rank} {self._next_count()}")

    def poll(self, ranks: Iterable[int], *, is_stuck: bool) -> None:
        """Read whether a hang is announced. Every few seconds, also read heartbeats.

        Args:
            ranks: The ranks that share a rank set with this rank, the most important first.
            is_stuck: Whether there was no progress for `stuck_seconds`. If not, heartbeats are read
                only while another rank announces a hang.
        """
        others_hang = self._is_hang_announced()
        if is_stuck or others_hang:
            now = self._store.now()
            if self._read_at is None:  # not all at once, and those first on which others depend
                is_urgent = self._is_first_of_block or others_hang
                delay = 0.0 if is_urgent else self._delays.uniform(0.5, 1.0)
                self._read_at = now + delay * self._interval_seconds
            if now >= self._read_at:
                self._read_at = now + self._delays.uniform(1.0, 1.5) * self._interval_seconds
                fields_by_rank = self._read(list(ranks))
                self.heartbeats = {
                    rank: self._heartbeat(rank, fields) for rank, fields in fields_by_rank.items()
                }
        self.others_hang = others_hang  # last: its readers need the heartbeats

    def clear(self) -> None:
        """Discard the heartbeats read so far, because training makes progress again.

        This rank's digest is deleted. At the next stall, it would look new to its readers.
        """
        self.heartbeats, self.others_hang = {}, False
        self._read_at, self._seen = None, {}
        self._announcement = self._announced_at = None
        if self._has_digest:
            self._store.delete_key(f"beats/{_block(self._rank)}")
            self._has_digest = False

    def _next_count(self) -> int:
        self._count += 1
        return self._count

    def _is_hang_announced(self) -> bool:
        if not self._store.check(["hang"]):
            return False
        announcement = self._store.get("hang")
        if int(announcement.split()[0]) == self._rank:
            return False
        now = self._store.now()
        if self._announcement not in (None, announcement):
            self._announced_at = now
        self._announcement = announcement
        return self._announced_at is not None and now - self._announced_at < ANNOUNCEMENT_SECONDS

    def _read(self, ranks: Sequence[int]) -> dict[int, Any]:
        """Return the fields by rank, from digests. Without a digest, read the ranks one by one."""
        if len(ranks) <= BLOCK_SIZE:
            return self._read_each(ranks)
        fields_by_rank = self._read_digests(ranks)
        if self._is_first_of_block:
            own = self._read_each(range(self._rank, self._rank + BLOCK_SIZE))
            for rank, fields in own.items():
                fields["age"] = self._age(f"beat/{rank}", fields["count"])
            digest = orjson.dumps([self._next_count(), list(own.items())])
            self._has_digest = True  # also if the store fails now, because it may be written
            self._store.set(f"beats/{_block(self._rank)}", zlib.compress(digest, 1))
            fields_by_rank |= own
        missing = [rank for rank in ranks if rank not in fields_by_rank]
        fields_by_rank |= self._read_each(missing[:MAX_SINGLE_READS])
        return {
            rank: fields_by_rank[rank]
            for rank in sorted(ranks)
            if fields_by_rank.get(rank) is not None
        }

    def _read_each(self, ranks: Sequence[int]) -> dict[int, Any]:
        values = self._values([f"beat/{rank}" for rank in ranks])
        return {int(key.partition("/")[2]): orjson.loads(value) for key, value in values.items()}

    def _read_digests(self, ranks: Sequence[int]) -> dict[int, Any]:
        """Return the fields that the first ranks of the other blocks have gathered.

        If a rank of such a block has no heartbeat, its value is None. A digest that does not change
        is ignored, because its writer may be the stuck rank. The same holds if there is none. Only
        at the first read, it may not be written yet: then nothing is known of its block.
        """
        fields_by_rank: dict[int, Any] = {}
        blocks = {_block(rank) for rank in ranks}
        if self._is_first_of_block:
            blocks.discard(_block(self._rank))
        keys = {block: f"beats/{block}" for block in sorted(blocks)}
        values = self._values(list(keys.values()))
        for block, key in keys.items():
            count, digest = orjson.loads(zlib.decompress(values[key])) if key in values else (0, [])
            age_seconds = self._age(key, count)
            if key not in values and age_seconds is not None:
                continue
            if (age_seconds or 0.0) < MAX_DIGEST_AGE_READS * self._interval_seconds:
                fields_by_rank |= dict.fromkeys(rank for rank in ranks if _block(rank) == block)
                fields_by_rank |= dict(digest)
        return fields_by_rank

    def _values(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the values of the keys that are present."""
        present = self._present(keys)
        return dict(zip(present, self._store.multi_get(present), strict=True)) if present else {}

    def _present(self, keys: Sequence[str]) -> list[str]:
        """Return the keys that are present. Takes one request if all keys are present."""
        if not keys or self._store.check(list(keys)):
            return list(keys)
        half = len(keys) // 2
        return [*self._present(keys[:half]), *self._present(keys[half:])] if half else []

    def _age(self, key: str, count: int) -> float | None:
        """Return the seconds for which a count was unchanged. None if the count is new."""
        known = self._seen.get(key)
        if known is None or known[0] != count:
            self._seen[key] = (count, self._store.now())
            return None if known is None else 0.0
        return self._store.now() - known[1]

    def _heartbeat(self, rank: int, fields: Mapping[str, Any]) -> Heartbeat:
        age_seconds = self._age(f"beat/{rank}", fields["count"])
        return Heartbeat(
            rank=rank,
            host=fields["host"],
            # Prefer the age that the writer of the digest saw: a reader may see a digest twice.
            age_seconds=fields.get("age", age_seconds),
            issued=fields["arrived"],
            pause=fields["pause"],
            step=fields["step"],
            unseen=fields["unseen"],
            interval_seconds=fields["interval"],
        )


def _block(rank: int) -> int:
    return rank // BLOCK_SIZE
