"""All that this rank and the others leave each other in the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from ..collectives.groups import RankSet
from .call_report import RankReport, encode
from .compare_result import CompareResult, decode
from .coordinator_reader import CoordinatorReader, report_stream, verdict_stream
from .heartbeats import Heartbeat, HeartbeatTable
from .store_connection import StoreConnection
from .store_log import StoreLogReader, StoreLogWriter


class StoreChannel:
    """This rank's reports, the verdicts that come back, and signs of life.

    Args:
        store: The store, of which no other thread uses this client.
        rank: This rank.
        host: This rank's host.
        patience_seconds: After how long a silence a rank is left out.
        stuck_seconds: How long training stands still before others' signs of life are read.
        on_failure: Called when a rank is left out, or says what cannot be read.

    Raises:
        RuntimeError: In any method but `forget_peers`, the store does not answer.
    """

    def __init__(
        self,
        store: StoreConnection,
        *,
        rank: int,
        host: str,
        patience_seconds: float,
        stuck_seconds: float,
        on_failure: Callable[[], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._rank = rank
        self._patience_seconds = patience_seconds
        self._on_failure = on_failure
        self._now = now
        self._outbox = StoreLogWriter(store, report_stream(rank), now)
        self._table = CoordinatorReader(store, rank, patience_seconds, on_failure, now)
        self._verdicts: dict[str, StoreLogReader] = {}
        self._signs = HeartbeatTable(store, rank, host, stuck_seconds, now)

    @property
    def peers(self) -> Mapping[int, Heartbeat]:
        """The others' last signs of life, by rank, while they are looked for."""
        return self._signs.beats

    @property
    def others_hang(self) -> bool:
        """Whether another rank told, when last looked for, that it hangs."""
        return self._signs.others_hang

    def report(self, report: RankReport) -> None:
        """Leave a report."""
        self._outbox.post(encode(report))

    def read(
        self, rank_sets: Iterable[RankSet], compared: RankSet | None
    ) -> list[tuple[RankSet, CompareResult]]:
        """Convene the rank sets of which this rank is the first, and return all new verdicts.

        Args:
            rank_sets: This rank's rank sets.
            compared: The rank set over which stragglers are looked for.
        """
        shared = [rank_set for rank_set in rank_sets if rank_set.size > 1]
        for rank_set in shared:
            self._table.seat(rank_set)
        verdicts = self._table.look(compared)
        for rank_set in shared:
            if rank_set.members[0] != self._rank:
                verdicts += [(rank_set, verdict) for verdict in self._read_verdicts(rank_set.key)]
        return verdicts

    def silence(self) -> float:
        """Return for how long the rank was silent, of those read here, that was silent longest."""
        verdicts = (inbox for inbox in self._verdicts.values() if inbox.has_heard)
        heard = (inbox.silent_seconds() for inbox in verdicts)
        return max(self._table.longest_silence(), *heard, 0.0)

    def beat(self, arrived: Mapping[str, int], pause: str | None) -> None:
        """Leave a sign of life.

        Args:
            arrived: The number of the last call issued, by the rank set's key.
            pause: Why this rank may lawfully stand still; None while it trains.
        """
        self._signs.beat(arrived, pause)

    def look_for_peers(self, rank_sets: Iterable[RankSet], *, is_stuck: bool) -> None:
        """Look who hangs and, now and then, for the signs of life of all that share a rank set.

        Args:
            rank_sets: This rank's rank sets.
            is_stuck: Whether training has stood still for `stuck_seconds`.
        """
        ranks = {rank for rank_set in rank_sets for rank in rank_set.members}
        self._signs.look(ranks, is_stuck=is_stuck)

    def forget_peers(self) -> None:
        """Forget what was seen of the others, as training moves."""
        self._signs.forget()

    def tell_of_hang(self) -> None:
        """Tell the others that this rank hangs."""
        self._signs.tell_of_hang()

    def _read_verdicts(self, key: str) -> list[CompareResult]:
        inbox = self._verdicts.get(key)
        if inbox is None:
            inbox = self._verdicts[key] = StoreLogReader(
                self._store, verdict_stream(key), self._now
            )
        verdicts = []
        for text in inbox.take(self._patience_seconds):
            try:
                verdicts.append(decode(text))
            except ValueError:  # of another version of zerowatch
                self._on_failure()
        return verdicts
