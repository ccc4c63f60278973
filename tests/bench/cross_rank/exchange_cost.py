"""Measures the CPU time of one cross-rank exchange, with a thousand ranks and with two.

A thousand simulated ranks report 200 calls each, of 20 sizes. The bench measures the CPU time of
its own thread. In the last rows two ranks share a real store; the other rows use no store. Rank 0
does the work of the first three rows, each in a different look.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from bench.bench_options import Options
from bench.result_table import Row
from torch.distributed import TCPStore

from zerowatch.metrics.catalog.labels import OPS, PHASES
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import CrossRankSettings
from zerowatch.runtime.collectives.collective_table import wire_factor
from zerowatch.runtime.collectives.groups import CollectiveCall, RankSet
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.phase_timer import PhaseTimer
from zerowatch.runtime.cross_rank.accounting.rank_comm_costs import RankCommCosts
from zerowatch.runtime.cross_rank.comparison_thread import POLLS_PER_EXCHANGE, ComparisonThread
from zerowatch.runtime.cross_rank.exchange.coordinator import Coordinator, rank_blocks
from zerowatch.runtime.cross_rank.exchange.rank_messages import (
    RankReport,
    decode_report,
    decode_result,
    encode_report,
    encode_result,
)
from zerowatch.runtime.cross_rank.rank_figures import RankFigures
from zerowatch.runtime.cross_rank.rank_statistics import RankStatistics
from zerowatch.runtime.cross_rank.stragglers import StepTimes

NUM_RANKS, CALLS, SIZES = 1000, 200, 20
GOAL_MS = 5.0
GOAL_MS_A_SECOND = 1.0
ANY_RANK = "any rank: encodes its report, decodes the result, matches"
BLOCK_FIRST = "first of a block: decodes 64 reports, merges them, encodes"
GROUP_FIRST = "first of all: decodes 16 blocks, merges them, detects stragglers, encodes"
STATISTICS = "first of all: publishes the statistics over ranks"
WITHOUT_BLOCKS = "for comparison, 1000 reports without blocks, decoded before"
STEP_TIMES = StepTimes(
    num_steps=20,
    step_seconds=0.25,
    busy_seconds=(0.01, 0.05, 0.1, 0.02),
    deviation_seconds=(0.001,) * 4,
)
T = TypeVar("T")


def bench(options: Options) -> Iterator[Row]:
    """Yield the milliseconds of each part of an exchange, and of each second of two ranks."""
    exchanges = 5 if options.quick else 30
    thousand = Thousand()
    for _ in range(exchanges):
        thousand.exchange()
    for what, spent_ms in thousand.spent_ms.items():
        yield _row(what, spent_ms, "ms", None if what == WITHOUT_BLOCKS else GOAL_MS)
    for rank, spent_ms in enumerate(each_second(exchanges)):
        what = f"exchange thread of rank {rank} of 2, {CALLS} calls each 5 s, over a TCPStore"
        yield _row(what, spent_ms, "ms/s", GOAL_MS_A_SECOND)


def _row(what: str, spent_ms: list[float], unit: str, goal_ms: float | None) -> Row:
    low, median, high = np.percentile(spent_ms, (5, 50, 95))
    return Row(
        what=what,
        measured=f"{median:.2f} {unit}",
        spread=f"{low:.2f} .. {high:.2f} (5th to 95th percentile)",
        goal="" if goal_ms is None else f"<= {goal_ms:g} {unit}",
        met=None if goal_ms is None else bool(median <= goal_ms),
    )


class SimulatedGroup:
    """One rank's process group, whose calls end at once."""

    role, backend, busy_until_ns, maybe_busy_until_ns = "dp", "gloo", 0, 0

    def __init__(self, members: tuple[int, ...]) -> None:
        self.size = len(members)
        self.rank_set = RankSet(members)
        self.rank_set.roles = [self.role]
        self._durations_ns = np.random.default_rng().gamma(2, 1e6, CALLS).astype(int).tolist()

    def wire_factor(self, op: int, payload_bytes: int) -> float:
        return wire_factor(OPS[op], self.backend, self.size, payload_bytes)

    def run_calls(self) -> None:
        """Issue the calls of one exchange."""
        for number, duration_ns in enumerate(self._durations_ns):
            group: Any = self
            size = 4096 * (1 + number % SIZES)
            call = CollectiveCall(0, group, size, torch.float32, PHASES.index("backward"))
            self.rank_set.issued += 1
            call.sequence = self.rank_set.issued
            call.start_ns = self.busy_until_ns
            call.end_ns = call.issued_ns = call.start_ns + duration_ns
            call.settle()
            self.rank_set.recent.append(call)


class SimulatedGroups:
    """The process groups of a rank that has one."""

    def __init__(self, group: SimulatedGroup) -> None:
        self._group = group

    def rank_sets(self) -> list[RankSet]:
        return [self._group.rank_set]


class SimulatedClients:
    """Makes clients of a store that does not move."""

    def __init__(self, server: TCPStore) -> None:
        self.connect = server.clone

    def moved(self) -> bool:
        return False


class Thousand:
    """A group of a thousand ranks. Those of a block share one rank's calls, as all do alike."""

    def __init__(self) -> None:
        self.spent_ms: defaultdict[str, list[float]] = defaultdict(list)
        members = tuple(range(NUM_RANKS))
        self._group = SimulatedGroup(members)
        rank_set = self._group.rank_set
        self._blocks = rank_blocks(members)
        self._in_block = {
            first: Coordinator(rank_set, {rank: (rank,) for rank in block})
            for first, block in self._blocks.items()
        }
        self._over_blocks = Coordinator(rank_set, self._blocks)
        self._over_all = Coordinator(rank_set, {rank: (rank,) for rank in members})
        recorder = Recorder()
        self._accounting = RankCommCosts(SimulatedGroups(self._group), recorder)
        self._figures, self._statistics = RankFigures(recorder), RankStatistics(recorder)

    def exchange(self) -> None:
        """Let all report, and measure what one rank of each kind does about it."""
        self._group.run_calls()
        own = self._spend(ANY_RANK, self._report)
        texts = [encode_report(self._alike(own, rank)) for rank in range(NUM_RANKS)]
        by_block = [{rank: texts[rank] for rank in block} for block in self._blocks.values()]
        merged = [self._spend(BLOCK_FIRST, lambda: self._merge_block(0, by_block[0]))]
        merged += map(self._merge_block, [*self._blocks][1:], by_block[1:])
        of_blocks = dict(zip(self._blocks, merged, strict=True))
        text = self._spend(GROUP_FIRST, lambda: _merge_all(self._over_blocks, _read(of_blocks)))
        figures = dict.fromkeys(range(NUM_RANKS), self._figures.read())
        self._spend(STATISTICS, lambda: self._statistics.publish(figures))
        spent_before_ms = self.spent_ms[ANY_RANK].pop()
        self._spend(ANY_RANK, lambda: self._match(text))
        self.spent_ms[ANY_RANK][-1] += spent_before_ms
        reports = _read(dict(enumerate(texts)))
        self._spend(WITHOUT_BLOCKS, lambda: _merge_all(self._over_all, reports))

    def _spend(self, what: str, body: Callable[[], T]) -> T:
        began = time.thread_time_ns()
        found = body()
        self.spent_ms[what].append((time.thread_time_ns() - began) / 1e6)
        return found

    def _report(self) -> RankReport:
        calls, names = self._accounting.drain_reports(is_compared=True)
        report = RankReport(
            calls=calls, names=names, step_times={0: STEP_TIMES}, figures={0: self._figures.read()}
        )
        encode_report(report)
        return report

    def _merge_block(self, first: int, texts: dict[int, bytes]) -> bytes:
        coordinator = self._in_block[first]
        for rank, report in _read(texts).items():
            coordinator.add(rank, report)
        merged = coordinator.drain_report()
        assert merged is not None
        return encode_report(merged)

    def _alike(self, own: RankReport, rank: int) -> RankReport:
        return RankReport(
            calls=own.calls,
            names=own.names,
            step_times={rank: STEP_TIMES},
            figures={rank: own.figures[0]},
        )

    def _match(self, text: bytes) -> None:
        self._accounting.match(self._group.rank_set, decode_result(text))
        self._accounting.expire(20.0, is_compared=True)
        self._accounting.publish()


def _read(texts: dict[int, bytes]) -> dict[int, RankReport]:
    return {rank: decode_report(text) for rank, text in texts.items()}


def _merge_all(coordinator: Coordinator, reports: dict[int, RankReport]) -> bytes:
    for rank, report in reports.items():
        coordinator.add(rank, report)
    found = coordinator.drain_result(compare_step_times=True)
    assert found is not None and len(found.min_durations) == CALLS and found.reference is not None
    return encode_result(found)


def each_second(exchanges: int) -> list[list[float]]:
    """Return the CPU milliseconds a second of each of two ranks, exchange by exchange."""
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), False)
    seconds = CrossRankSettings().interval_seconds
    now = [1000.0]
    groups = [SimulatedGroup((0, 1)) for _ in range(2)]
    ranks = [
        ComparisonThread(
            clients=SimulatedClients(server),
            rank=rank,
            world_size=2,
            host="host",
            groups=SimulatedGroups(group),
            phase_timer=PhaseTimer(lambda: 0),
            recorder=Recorder(),
            fail_open=FailOpen(),
            interval_seconds=seconds,
            stuck_seconds=15.0,
            now=lambda: now[0],
        )
        for rank, group in enumerate(groups)
    ]
    for thread in ranks:
        thread._connect()
    spent_ms: list[list[float]] = [[], []]
    for _ in range(exchanges):
        began = [0.0, 0.0]
        for group in groups:
            group.run_calls()
        for _ in range(POLLS_PER_EXCHANGE):
            for rank, thread in enumerate(ranks):
                before = time.thread_time()
                thread._poll()
                began[rank] += time.thread_time() - before
            now[0] += seconds / POLLS_PER_EXCHANGE
        for rank in (0, 1):
            spent_ms[rank].append(1000 * began[rank] / seconds)
    return spent_ms
