"""The reports that come to this rank, as the first of a circle or of a block, through the store."""

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
    """Name the row of texts in which a circle's verdicts stand."""
    return f"verdict/{key}"


def _block_stream(circle: RankSet, rank: int) -> str:
    return f"block/{circle.key}/{rank}"


class _Reader:
    """One row of texts, and who of this rank's conveners gets them."""

    def __init__(self, inbox: StoreLogReader, child: int) -> None:
        self.inbox = inbox
        self.child = child
        self.conveners: list[Coordinator] = []
        self.left_out = False


class CoordinatorReader:
    """Convenes the circles, and the blocks of circles, of which this rank is the first.

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
        self._circles: list[tuple[RankSet, Coordinator, StoreLogWriter]] = []

    def seat(self, circle: RankSet) -> None:
        """Convene a circle, if that is this rank's to do. Does nothing the second time."""
        if circle.key in self._known or circle.size < 2:
            return
        self._known.add(circle.key)
        blocks = rank_blocks(circle.members)
        in_blocks = len(blocks) < circle.size
        if in_blocks and self._rank in blocks:
            convener = Coordinator(circle, {rank: (rank,) for rank in blocks[self._rank]})
            self._subscribe(convener, {rank: report_stream(rank) for rank in blocks[self._rank]})
            self._blocks.append((circle, convener, self._outbox(_block_stream(circle, self._rank))))
        if self._rank == circle.members[0]:
            convener = Coordinator(circle, blocks)
            streams = {
                child: _block_stream(circle, child) if in_blocks else report_stream(child)
                for child in blocks
            }
            self._subscribe(convener, streams)
            self._circles.append((circle, convener, self._outbox(verdict_stream(circle.key))))

    def look(self, compared: RankSet | None) -> list[tuple[RankSet, CompareResult]]:
        """Read what has come, pass on what came of it, and return this rank's own verdicts.

        Args:
            compared: The circle over which stragglers are looked for.
        """
        for reader in self._readers.values():
            self._read(reader)
        for circle, convener, outbox in self._blocks:
            report = convener.take_report()
            if report is not None or self._must_speak(outbox):
                outbox.post(encode(report or RankReport(sections={circle.key: NOTHING_NEW})))
        verdicts = []
        for circle, convener, outbox in self._circles:
            verdict = convener.take_verdict(compares_pace=circle is compared)
            if verdict is not None or self._must_speak(outbox):
                outbox.post(pack_verdict(verdict or NO_RESULT))
            if verdict is not None:
                verdicts.append((circle, verdict))
        return verdicts

    def longest_silence(self) -> float:
        """Return the seconds since the rank reported that is silent longest; 0 if none should."""
        reports = {report_stream(reader.child) for reader in self._readers.values()}
        silences = (
            reader.inbox.silent_seconds()
            for name, reader in self._readers.items()
            if reader.inbox.has_heard or name in reports  # of a block not all may use the circle
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
