"""What one exchange costs a rank among a thousand, and a rank of two each second.

A thousand simulated ranks report 200 calls each, of 20 sizes. CPU time of this thread, without any
store but for the last rows, where two ranks share a real one. Rank 0 does all of the first three
rows, each at another look.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from options import Options
from table import Row
from torch.distributed import TCPStore

from zerowatch.metrics.catalog.labels import OPS, PHASES
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import CrossRankSettings
from zerowatch.runtime.collectives.call import CollectiveCall
from zerowatch.runtime.collectives.groups import RankSet
from zerowatch.runtime.collectives.ops import wire_factor
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.cross_rank import call_report, compare_result
from zerowatch.runtime.cross_rank.call_report import RankReport, StepTimes
from zerowatch.runtime.cross_rank.coordinator import Coordinator, rank_blocks
from zerowatch.runtime.cross_rank.cross_rank_thread import LOOKS_PER_EXCHANGE, CrossRankThread
from zerowatch.runtime.cross_rank.local_accounting import LocalAccounting

NUM_RANKS, CALLS, SIZES = 1000, 200, 20
GOAL_MS = 5.0
GOAL_MS_A_SECOND = 1.0
ANY_RANK = "any rank: packs its report, unpacks the verdict, matches"
BLOCK_FIRST = "first of a block: unpacks 64 reports, puts them together, packs"
GROUP_FIRST = "first of all: unpacks 16 blocks, puts them together, seeks stragglers, packs"
WITHOUT_BLOCKS = "for comparison, 1000 reports without blocks, unpacked before"
PACE = StepTimes(steps=20, step_seconds=0.25, busy=(0.01, 0.05, 0.1, 0.02), deviation=(0.001,) * 4)
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

    role, backend, busy_until_ns = "dp", "gloo", 0

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
        self._books = LocalAccounting(lambda: [rank_set], Recorder(), lambda: None)

    def exchange(self) -> None:
        """Let all report, and measure what one rank of each kind does about it."""
        self._group.run_calls()
        own = self._spend(ANY_RANK, self._report)
        texts = [call_report.encode(self._alike(own, rank)) for rank in range(NUM_RANKS)]
        told = [{rank: texts[rank] for rank in block} for block in self._blocks.values()]
        merged = [self._spend(BLOCK_FIRST, lambda: self._put_block_together(0, told[0]))]
        merged += map(self._put_block_together, [*self._blocks][1:], told[1:])
        of_blocks = dict(zip(self._blocks, merged, strict=True))
        text = self._spend(GROUP_FIRST, lambda: _merge_all(self._over_blocks, _read(of_blocks)))
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
        sections, names = self._books.take_sections()
        report = RankReport(sections=sections, names=names, paces={0: PACE})
        call_report.encode(report)
        return report

    def _put_block_together(self, first: int, texts: dict[int, bytes]) -> bytes:
        convener = self._in_block[first]
        for rank, report in _read(texts).items():
            convener.add(rank, report)
        merged = convener.take_report()
        assert merged is not None
        return call_report.encode(merged)

    def _alike(self, own: RankReport, rank: int) -> RankReport:
        return RankReport(sections=own.sections, names=own.names, paces={rank: PACE})

    def _match(self, text: bytes) -> None:
        self._books.match(self._group.rank_set, compare_result.decode(text))
        self._books.give_up(20.0)
        self._books.publish()


def _read(texts: dict[int, bytes]) -> dict[int, RankReport]:
    return {rank: call_report.decode(text) for rank, text in texts.items()}


def _merge_all(convener: Coordinator, reports: dict[int, RankReport]) -> bytes:
    for rank, report in reports.items():
        convener.add(rank, report)
    found = convener.take_verdict(compares_pace=True)
    assert found is not None and len(found.least) == CALLS and found.reference is not None
    return compare_result.encode(found)


def each_second(exchanges: int) -> list[list[float]]:
    """Return the CPU milliseconds a second of each of two ranks, exchange by exchange."""
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), False)
    seconds = CrossRankSettings().interval_seconds
    now = [1000.0]
    groups = [SimulatedGroup((0, 1)) for _ in range(2)]
    ranks = [
        CrossRankThread(
            connect=server.clone,
            rank=rank,
            host="host",
            rank_sets=lambda group=group: [group.rank_set],
            recorder=Recorder(),
            fail_open=FailOpen(),
            seconds=seconds,
            volume_ratio=lambda: None,
            idle_seconds=lambda: 0.0,
            stuck_seconds=15.0,
            now=lambda: now[0],
        )
        for rank, group in enumerate(groups)
    ]
    for exchange in ranks:
        exchange._open()
    spent_ms: list[list[float]] = [[], []]
    for _ in range(exchanges):
        began = [0.0, 0.0]
        for group in groups:
            group.run_calls()
        for _ in range(LOOKS_PER_EXCHANGE):
            for rank, exchange in enumerate(ranks):
                before = time.thread_time()
                exchange._look()
                began[rank] += time.thread_time() - before
            now[0] += seconds / LOOKS_PER_EXCHANGE
        for rank in (0, 1):
            spent_ms[rank].append(1000 * began[rank] / seconds)
    return spent_ms
