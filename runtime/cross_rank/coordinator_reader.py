"""Reads the reports that arrive at the first rank of a rank set, or of a block, from the store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..collectives.groups import RankSet
from .call_report import NOTHING_NEW, RankReport, decode, encode
from .compare_result import NO_RESULT, CompareResult
from .compare_result import encode as pack_verdict
from .coordinator import Coordinator, rank_blocks
from .store_connection import StoreConnection
from .store_log import StoreLogReader, StoreLogWriter

logger = logging.getLogger(__name__)

# Exchanges after which a rank that says nothing is left out, and a call without an answer counted
# alone.
PATIENCE_EXCHANGES = 4


def report_stream(rank: int) -> str:
    """Name the row of texts in which a rank reports."""
    return f"report/{rank}"


def verdict_stream(key: str) -> str:
    """Name the row of texts in which a rank set's verdicts stand."""
    return f"verdict/{key}"


def _block_stream(rank_set: RankSet, rank: int) -> str:
    return f"block/{rank_set.key}/{rank}"


class _Reader:
    """One row of texts, and who of this rank's conveners gets them."""

    def __init__(self, inbox: StoreLogReader, child: int) -> None:
        self.inbox = inbox
        self.child = child
        self.conveners: list[Coordinator] = []
        self.left_out = False


class CoordinatorReader:
    """Convenes the rank sets, and the blocks of rank sets, of which this rank is the first.

    Args:
        store: The store.
        rank: This rank.
        patience_seconds: After how long a silence a rank is left out.
        on_failure: Called when a rank is left out, or says what cannot be read.

    Raises:
        RuntimeError: In any method, the store does not answer.
    """

    def __init__(
        self,
        store: StoreConnection,
        rank: int,
        patience_seconds: float,
        on_failure: Callable[[], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._rank = rank
        self._patience_seconds = patience_seconds
        self._on_failure = on_failure
        self._now = now
        self._known: set[str] = set()
        self._readers: dict[str, _Reader] = {}
        self._blocks: list[tuple[RankSet, Coordinator, StoreLogWriter]] = []
        self._rank_sets: list[tuple[RankSet, Coordinator, StoreLogWriter]] = []

    def seat(self, rank_set: RankSet) -> None:
        """Convene a rank set, if that is this rank's to do. Does nothing the second time."""
        if rank_set.key in self._known or rank_set.size < 2:
            return
        self._known.add(rank_set.key)
        blocks = rank_blocks(rank_set.members)
        in_blocks = len(blocks) < rank_set.size
        if in_blocks and self._rank in blocks:
            convener = Coordinator(rank_set, {rank: (rank,) for rank in blocks[self._rank]})
            self._subscribe(convener, {rank: report_stream(rank) for rank in blocks[self._rank]})
            outbox = self._outbox(_block_stream(rank_set, self._rank))
            self._blocks.append((rank_set, convener, outbox))
        if self._rank == rank_set.members[0]:
            convener = Coordinator(rank_set, blocks)
            streams = {
                child: _block_stream(rank_set, child) if in_blocks else report_stream(child)
                for child in blocks
            }
            self._subscribe(convener, streams)
            self._rank_sets.append((rank_set, convener, self._outbox(verdict_stream(rank_set.key))))

    def look(self, compared: RankSet | None) -> list[tuple[RankSet, CompareResult]]:
        """Read what has come, pass on what came of it, and return this rank's own verdicts.

        Args:
            compared: The rank set over which stragglers are looked for.
        """
        for reader in self._readers.values():
            self._read(reader)
        for rank_set, convener, outbox in self._blocks:
            report = convener.take_report()
            if report is not None or self._must_speak(outbox):
                outbox.post(encode(report or RankReport(sections={rank_set.key: NOTHING_NEW})))
        verdicts = []
        for rank_set, convener, outbox in self._rank_sets:
            verdict = convener.take_verdict(compares_pace=rank_set is compared)
            if verdict is not None or self._must_speak(outbox):
                outbox.post(pack_verdict(verdict or NO_RESULT))
            if verdict is not None:
                verdicts.append((rank_set, verdict))
        return verdicts

    def longest_silence(self) -> float:
        """Return the seconds since the rank reported that is silent longest; 0 if none should."""
        reports = {report_stream(reader.child) for reader in self._readers.values()}
        silences = (
            reader.inbox.silent_seconds()
            for name, reader in self._readers.items()
            if reader.inbox.has_heard or name in reports  # of a block not all may use the rank set
        )
        return max(silences, default=0.0)

    def _outbox(self, name: str) -> StoreLogWriter:
        return StoreLogWriter(self._store, name, self._now)

    def _must_speak(self, outbox: StoreLogWriter) -> bool:
        """Whether readers have waited for long, though there is nothing to tell."""
        return PATIENCE_EXCHANGES * outbox.silent_seconds() > 1.2 * self._patience_seconds

    def _subscribe(self, convener: Coordinator, streams: dict[int, str]) -> None:
        for child, name in streams.items():
            if name not in self._readers:
                self._readers[name] = _Reader(StoreLogReader(self._store, name, self._now), child)
            self._readers[name].conveners.append(convener)

    def _read(self, reader: _Reader) -> None:
        for text in reader.inbox.take(self._patience_seconds):
            reader.left_out = False
            try:
                report = decode(text)
            except ValueError:  # of another version of zerowatch
                self._on_failure()
                continue
            for convener in reader.conveners:
                convener.add(reader.child, report)
        if reader.inbox.silent_seconds() > self._patience_seconds:
            self._leave_out(reader)

    def _leave_out(self, reader: _Reader) -> None:
        if reader.left_out:
            return
        reader.left_out = True
        self._on_failure()
        logger.warning(
            "rank %d has not reported for %.0f s: the ranks are compared without it until it does. "
            "It may be stuck or stopped, or not be watched.",
            reader.child,
            reader.inbox.silent_seconds(),
        )
        for convener in reader.conveners:
            convener.leave_out(reader.child)
