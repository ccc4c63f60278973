"""Sends and receives the reports, results and heartbeats of the ranks over the c10d store."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ....metrics.catalog import communication
from ....metrics.recorder import Recorder
from ...collectives.groups import RankSet
from ...common.format_numbers import format_ranks
from ...common.gil_pauses import let_training_run
from ..rank_figures import Figures
from .coordinator import Coordinator, rank_blocks
from .figure_collector import FigureCollector
from .heartbeats import HeartbeatTable
from .rank_messages import (
    EMPTY_CALL_REPORT,
    EMPTY_RESULT,
    CompareResult,
    Heartbeat,
    RankReport,
    decode_report,
    decode_result,
    encode_report,
    encode_result,
)
from .store_log import StoreConnection, StoreLogReader, StoreLogWriter

logger = logging.getLogger(__name__)

# A rank is left out after this many exchanges without a report. A call counts as unmatched after
# this many exchanges without a result.
PATIENCE_EXCHANGES = 4


class StoreChannel:
    """Connects one rank to the other ranks: sends reports, and reads results and heartbeats.

    Args:
        store: The connection.
        rank: This rank.
        world_size: Number of ranks of the job.
        host: This rank's host.
        patience_seconds: Time without a report after which a rank is left out.
        stuck_seconds: Time without progress after which the heartbeats of other ranks are read.
        recorder: Counts ranks that are left out, and messages that cannot be decoded.

    Raises:
        RuntimeError: The store does not respond; raised by every method.
    """

    def __init__(
        self,
        store: StoreConnection,
        *,
        rank: int,
        world_size: int,
        host: str,
        patience_seconds: float,
        stuck_seconds: float,
        recorder: Recorder,
    ) -> None:
        self._store = store
        self._rank = rank
        self._patience_seconds = patience_seconds
        self._recorder = recorder
        self._reports = StoreLogWriter(store, _report_log(rank))
        self._figures = FigureCollector(rank, world_size, patience_seconds, store.now)
        self._coordinators = CoordinatorReader(
            store, rank, patience_seconds, recorder, self._figures
        )
        self._results: dict[str, StoreLogReader] = {}
        self._heartbeats = HeartbeatTable(store, rank, host, stuck_seconds)

    @property
    def peers(self) -> Mapping[int, Heartbeat]:
        """The last heartbeats that were read, by rank."""
        return self._heartbeats.heartbeats

    @property
    def others_hang(self) -> bool:
        """Whether another rank had announced a hang at the last poll."""
        return self._heartbeats.others_hang

    def post_report(self, report: RankReport) -> None:
        """Send a report to the coordinators."""
        self._reports.append(encode_report(report))

    def post_last_report(self) -> None:
        """Tell the coordinators that this rank sends no more, because monitoring ends."""
        self._reports.append(encode_report(RankReport(calls={}, is_last=True)))
        self._coordinators.end_blocks()

    def known_figures(self) -> dict[int, Figures]:
        """Return the last figures of the other ranks that report to this rank, by rank."""
        return self._figures.known()

    def poll(
        self, rank_sets: Iterable[RankSet], compared: RankSet | None
    ) -> list[tuple[RankSet, CompareResult]]:
        """Coordinate the rank sets whose first member is this rank, and return all new results.

        Args:
            rank_sets: This rank's rank sets.
            compared: The rank set over which stragglers are detected.
        """
        shared = [coordinated for coordinated in rank_sets if coordinated.size > 1]
        for coordinated in shared:
            self._coordinators.add(coordinated)
        results = self._coordinators.poll(compared)
        for coordinated in shared:
            if coordinated.members[0] != self._rank:
                results += [(coordinated, result) for result in self._read_results(coordinated.key)]
        return results

    def longest_silence_seconds(self) -> float:
        """Return the seconds since the last entry of the log that has been silent longest."""
        readers = (reader for reader in self._results.values() if reader.has_entries)
        silences = (reader.silent_seconds() for reader in readers)
        return max(self._coordinators.longest_silence_seconds(), *silences, 0.0)

    def post_heartbeat(
        self,
        issued: Mapping[str, int],
        pause: str | None,
        step: int = 0,
        unseen: Mapping[str, int] | None = None,
        interval_seconds: float = 0.0,
    ) -> None:
        """Send a heartbeat.

        Args:
            issued: The number of the last call issued, by the rank set's key.
            pause: Why this rank is expected to make no progress. None while the rank trains.
            step: The last step that ended.
            unseen: The calls since then that no wrapper has seen, by the rank set's key.
            interval_seconds: Minimum time between two heartbeats while the rank trains.
        """
        self._heartbeats.post(issued, pause, step, unseen, interval_seconds)

    def poll_heartbeats(self, rank_sets: Iterable[RankSet], *, is_stuck: bool) -> None:
        """Read whether a hang is announced. Every few seconds, also read the members' heartbeats.

        Args:
            rank_sets: This rank's rank sets.
            is_stuck: Whether there was no progress for `stuck_seconds`.
        """
        smallest_first = sorted(rank_sets, key=lambda rank_set: rank_set.size)
        ranks = dict.fromkeys(rank for rank_set in smallest_first for rank in rank_set.members)
        self._heartbeats.poll(ranks, is_stuck=is_stuck)

    def clear_heartbeats(self) -> None:
        """Discard the heartbeats read so far, because training makes progress again."""
        self._heartbeats.clear()

    def announce_hang(self) -> None:
        """Announce to the other ranks that this rank hangs."""
        self._heartbeats.announce_hang()

    def _read_results(self, key: str) -> list[CompareResult]:
        reader = self._results.get(key)
        if reader is None:
            reader = self._results[key] = StoreLogReader(self._store, _result_log(key))
        results = []
        for entry in reader.poll(self._patience_seconds):
            try:
                results.append(decode_result(entry))
            except ValueError:  # of another version of zerowatch
                _count_peer_failure(self._recorder)
        return results


class CoordinatorReader:
    """Reads reports, for the rank sets and blocks of rank sets whose first member is this rank.

    Args:
        store: The connection.
        rank: This rank.
        patience_seconds: Time without a report after which a rank is left out.
        recorder: Counts ranks that are left out, and messages that cannot be decoded.
        figures: Receives all reports that contain figures.

    Raises:
        RuntimeError: The store does not respond; raised by every method.
    """

    def __init__(
        self,
        store: StoreConnection,
        rank: int,
        patience_seconds: float,
        recorder: Recorder,
        figures: FigureCollector,
    ) -> None:
        self._store = store
        self._rank = rank
        self._patience_seconds = patience_seconds
        self._recorder = recorder
        self._known: set[str] = set()
        self._figures = figures
        self._sources = {  # by the log's name
            (name := _report_log(child)): self._new_source(name, child)
            for child in figures.children
        }
        self._blocks: list[_Coordinated] = []
        self._rank_sets: list[_Coordinated] = []

    def add(self, rank_set: RankSet) -> None:
        """Coordinate a rank set, if this rank is responsible. A second call does nothing."""
        if rank_set.key in self._known or rank_set.size < 2:
            return
        self._known.add(rank_set.key)
        blocks = rank_blocks(rank_set.members)
        has_blocks = len(blocks) < rank_set.size
        if has_blocks and self._rank in blocks:
            block = blocks[self._rank]
            coordinator = Coordinator(rank_set, {rank: (rank,) for rank in block})
            self._subscribe(coordinator, {rank: _report_log(rank) for rank in block})
            self._blocks.append(
                _Coordinated(rank_set, coordinator, self._writer(_block_log(rank_set, self._rank)))
            )
        if self._rank == rank_set.members[0]:
            coordinator = Coordinator(rank_set, blocks)
            logs = {
                child: _block_log(rank_set, child) if has_blocks else _report_log(child)
                for child in blocks
            }
            self._subscribe(coordinator, logs)
            self._rank_sets.append(
                _Coordinated(rank_set, coordinator, self._writer(_result_log(rank_set.key)))
            )

    def poll(self, compared: RankSet | None) -> list[tuple[RankSet, CompareResult]]:
        """Read new reports, send what results from them, and return this rank's own results.

        Args:
            compared: The rank set over which stragglers are detected.
        """
        silent: list[_Source] = []
        for source in self._sources.values():
            if self._read(source):
                silent.append(source)
            let_training_run()
        self._log_silent(silent)
        for block in self._blocks:
            report = block.coordinator.drain_report()
            let_training_run()
            if report is not None or self._keep_alive_due(block.writer):
                empty = RankReport(calls={block.rank_set.key: EMPTY_CALL_REPORT})
                block.writer.append(encode_report(report or empty))
        results = []
        for coordinated in self._rank_sets:
            result = coordinated.coordinator.drain_result(
                compare_step_times=coordinated.rank_set is compared
            )
            let_training_run()
            if result is not None or self._keep_alive_due(coordinated.writer):
                coordinated.writer.append(encode_result(result or EMPTY_RESULT))
            let_training_run()
            if result is not None:
                results.append((coordinated.rank_set, result))
        return results

    def end_blocks(self) -> None:
        """Tell the first ranks of the rank sets that this rank merges its blocks no more."""
        for block in self._blocks:
            empty = {block.rank_set.key: EMPTY_CALL_REPORT}
            block.writer.append(encode_report(RankReport(calls=empty, is_last=True)))

    def longest_silence_seconds(self) -> float:
        """Return the longest time since a rank's last report in seconds, or 0 without ranks."""
        silences = (
            source.reader.silent_seconds()
            for name, source in self._sources.items()
            if source.coordinators
            and not source.has_ended
            # Some ranks of a block may not use the rank set, but every rank sends reports.
            and (source.reader.has_entries or name == _report_log(source.child))
        )
        return max(silences, default=0.0)

    def _writer(self, name: str) -> StoreLogWriter:
        return StoreLogWriter(self._store, name)

    def _keep_alive_due(self, writer: StoreLogWriter) -> bool:
        """Whether an empty entry is due, so that readers do not see a silence."""
        return PATIENCE_EXCHANGES * writer.silent_seconds() > 1.2 * self._patience_seconds

    def _subscribe(self, coordinator: Coordinator, logs: Mapping[int, str]) -> None:
        for child, name in logs.items():
            source = self._sources.get(name)
            if source is None or not source.coordinators:
                # The coordinator also needs the entries that were read for their figures only.
                source = self._sources[name] = self._new_source(name, child)
            source.coordinators.append(coordinator)

    def _new_source(self, name: str, child: int) -> _Source:
        return _Source(StoreLogReader(self._store, name), child)

    def _read(self, source: _Source) -> bool:
        """Read the new entries of a log. Return whether its rank has fallen silent since.

        A rank that has ended in good order is left out later like a silent one: its last calls wait
        for the reports of the other ranks.
        """
        for entry in source.reader.poll(self._patience_seconds):
            source.is_excluded = source.has_ended = False
            try:
                report = decode_report(entry)
            except ValueError:  # of another version of zerowatch
                _count_peer_failure(self._recorder)
                continue
            if report.is_last:
                source.has_ended = True
                continue
            self._figures.add(source.child, report)
            for coordinator in source.coordinators:
                coordinator.add(source.child, report)
                let_training_run()
        is_silent = source.reader.silent_seconds() > self._patience_seconds
        return is_silent and self._exclude(source) and not source.has_ended

    def _exclude(self, source: _Source) -> bool:
        """Leave a rank out. Return whether it took part until now."""
        if source.is_excluded or not source.coordinators:
            return False
        source.is_excluded = True
        for coordinator in source.coordinators:
            coordinator.exclude(source.child)
        return True

    def _log_silent(self, silent: Sequence[_Source]) -> None:
        """Count the ranks that have fallen silent, and name them in one line."""
        if not silent:
            return
        for _ in silent:
            _count_peer_failure(self._recorder)
        ranks = sorted({source.child for source in silent})
        logger.warning(
            "%s %s not reported for %.0f s and %s excluded from the comparison until the next "
            "report: it may hang, be stopped, or run without monitoring",
            format_ranks(ranks),
            "has" if len(ranks) == 1 else "have",
            max(source.reader.silent_seconds() for source in silent),
            "is" if len(ranks) == 1 else "are",
        )


@dataclass(slots=True)
class _Source:
    """A log, the rank that writes the log, and this rank's coordinators that use the log.

    A log without coordinators is read for its figures only.
    """

    reader: StoreLogReader
    child: int
    coordinators: list[Coordinator] = field(default_factory=list)
    is_excluded: bool = False
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class _Coordinated:
    """A rank set, or a block of it, that this rank coordinates, and the log of the outcome."""

    rank_set: RankSet
    coordinator: Coordinator
    writer: StoreLogWriter


def _report_log(rank: int) -> str:
    return f"report/{rank}"


def _block_log(rank_set: RankSet, first_rank: int) -> str:
    return f"block/{rank_set.key}/{first_rank}"


def _result_log(key: str) -> str:
    return f"result/{key}"


def _count_peer_failure(recorder: Recorder) -> None:
    recorder.add(communication.EXCHANGE_FAILURES, 1, "peer")
