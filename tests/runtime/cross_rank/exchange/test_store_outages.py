"""Tests of the comparison threads while the store fails, is unknown, or changes namespace."""

from __future__ import annotations

import logging
from datetime import timedelta
from itertools import pairwise

import pytest
from fakes.comparison_threads import INTERVAL_SECONDS, ComparedRank, ComparedRanks
from fakes.rank_sets import FakeGroup
from fakes.scraper import eventually
from torch.distributed import HashStore, PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Store

from zerowatch.metrics.catalog import communication
from zerowatch.runtime.cross_rank.comparison_thread import CLOSING_SECONDS
from zerowatch.runtime.cross_rank.exchange.store_channel import PATIENCE_EXCHANGES
from zerowatch.runtime.cross_rank.exchange.store_log import (
    FIRST_RETRY_SECONDS,
    MAX_ENTRIES,
    MAX_RETRY_SECONDS,
)

TIMEOUT = timedelta(seconds=60)
EXPOSED, WAIT = communication.COMM_EXPOSED_SECONDS, communication.COMM_WAIT_SECONDS


class Outage:
    """Two ranks over a TCPStore that comes and goes."""

    def __init__(self) -> None:
        self.server: TCPStore | None = TCPStore("127.0.0.1", 0, None, True, TIMEOUT, False)
        self.port = self.server.port
        self.ranks = ComparedRanks(2)
        clock = self.ranks.clock
        self.ranks.all = [
            ComparedRank(rank, clock, self.connect, FakeGroup((0, 1))).connect() for rank in (0, 1)
        ]

    def connect(self) -> Store:
        if self.server is None:
            raise RuntimeError("no server")
        return PrefixStore("zerowatch", self.server.clone())

    def begin(self) -> None:
        self.server = None

    def end(self) -> None:
        self.server = TCPStore("127.0.0.1", self.port, None, True, TIMEOUT, False)


def test_after_a_store_failure_costs_are_not_matched() -> None:
    outage = Outage()
    ranks = outage.ranks
    for rank in ranks.all:
        rank.run(10)
    ranks.exchange(times=2)
    for rank in ranks.all:
        rank.run(5)
    outage.begin()

    ranks.exchange(times=3)

    for rank in ranks.all:
        assert rank.fail_open.failures == {}
        assert rank.failures("store") == 1
        assert rank.failures("unmatched") == 0
        assert rank.milliseconds(EXPOSED, "dp") == pytest.approx(15)
        assert rank.thread.peers == {}


def test_ranks_are_compared_again_once_the_store_responds_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outage = Outage()
    ranks = outage.ranks
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            ranks[0].run(10)
            ranks[1].run(4)
            ranks.exchange()
        before = ranks[0].milliseconds(WAIT, "dp")
        outage.begin()
        ranks.exchange(times=round(FIRST_RETRY_SECONDS / INTERVAL_SECONDS) + 1)
        outage.end()
        ranks.exchange(times=round(2 * FIRST_RETRY_SECONDS / INTERVAL_SECONDS) + 1)
        for _ in range(3):
            ranks[0].run(10)
            ranks[1].run(4)
            ranks.exchange(times=2)

    assert before == pytest.approx(18, abs=1e-4)
    assert ranks[0].milliseconds(WAIT, "dp") == pytest.approx(36, abs=1e-4)
    assert [rank.failures("peer") for rank in ranks.all] == [0, 0]
    assert [rank.failures("store") for rank in ranks.all] == [2, 2]
    assert [rank.fail_open.failures for rank in ranks.all] == [{}, {}]
    lines = [record.message.partition(" (")[0] for record in caplog.records]
    assert lines == [
        *["c10d store does not respond: comparison with other ranks paused"] * 2,
        *["c10d store responds again: comparison with other ranks resumed"] * 2,
    ]


def test_a_rank_that_alone_lost_the_store_joins_the_others_later() -> None:
    ranks = ComparedRanks(3)
    ranks.exchange(times=2 * MAX_ENTRIES)
    ranks[0].thread._connection.mark_failed()
    away = round(FIRST_RETRY_SECONDS / INTERVAL_SECONDS)
    for _ in range(away + PATIENCE_EXCHANGES + 2):
        for rank, milliseconds in zip(ranks.all, (10, 8, 3), strict=True):
            rank.run(milliseconds)
        ranks.exchange()
    before = ranks[1].milliseconds(WAIT, "dp")
    for rank, milliseconds in zip(ranks.all, (10, 8, 3), strict=True):
        rank.run(milliseconds)
    ranks.exchange(times=2)

    assert ranks[1].milliseconds(WAIT, "dp") - before == pytest.approx(5, abs=1e-4)
    assert ranks[0].failures("peer") == 0


def test_a_store_that_keeps_failing_is_tried_less_and_less_often() -> None:
    ranks = ComparedRanks(2)
    tried: list[float] = []

    def refuse() -> Store:
        tried.append(ranks.clock.seconds)
        raise RuntimeError("no server")

    ranks.all = [ComparedRank(0, ranks.clock, refuse, FakeGroup((0, 1))).connect()]

    ranks.exchange(times=300)

    pauses = [b - a for a, b in pairwise(tried)]
    assert pauses[:5] == [FIRST_RETRY_SECONDS, 60, 120, 240, MAX_RETRY_SECONDS]
    assert set(pauses[5:]) == {MAX_RETRY_SECONDS}


def test_ranks_start_over_in_a_new_namespace() -> None:
    ranks = ComparedRanks(2)
    stores = {
        rank: HashStore() for rank in (0, 1)
    }  # rank 1 is in the namespace of an earlier restart
    ranks.all = [
        ComparedRank(
            rank,
            ranks.clock,
            lambda rank=rank: stores[rank],
            FakeGroup((0, 1)),
        ).connect()
        for rank in (0, 1)
    ]
    for rank, milliseconds in zip(ranks.all, (10, 4), strict=True):
        rank.run(milliseconds)
    ranks.exchange(times=2)
    before = ranks[0].milliseconds(WAIT, "dp")
    stores[1] = stores[0]
    ranks[1].clients.has_moved = True
    for _ in range(3):
        for rank, milliseconds in zip(ranks.all, (10, 4), strict=True):
            rank.run(milliseconds)
        ranks.exchange(times=2)

    assert before == 0
    assert ranks[0].milliseconds(WAIT, "dp") >= 12
    assert [rank.failures("peer") for rank in ranks.all] == [0, 0]


def test_calls_from_before_the_namespace_was_known_are_compared() -> None:
    ranks = ComparedRanks(2)
    stores: list[Store] = []
    ranks.all = [
        ComparedRank(
            rank, ranks.clock, lambda: stores[0] if stores else None, FakeGroup((0, 1))
        ).connect()
        for rank in (0, 1)
    ]
    for rank, milliseconds in zip(ranks.all, (10, 4), strict=True):
        rank.run(milliseconds)
    ranks.exchange()
    stores.append(ranks.store)
    ranks.exchange(times=2)

    assert ranks[0].milliseconds(WAIT, "dp") == pytest.approx(6, abs=1e-4)


def test_without_a_namespace_costs_are_not_matched_and_no_failures() -> None:
    ranks = ComparedRanks(2)
    ranks.all = [ComparedRank(0, ranks.clock, lambda: None, FakeGroup((0, 1))).connect()]
    for _ in range(2 * PATIENCE_EXCHANGES):
        ranks[0].run(7)
        ranks.exchange()

    assert ranks[0].milliseconds(EXPOSED, "dp") == pytest.approx(14 * PATIENCE_EXCHANGES)
    assert [ranks[0].failures(reason) for reason in ("store", "unmatched")] == [0, 0]


def test_a_store_that_cannot_be_reached_is_counted_and_no_more() -> None:
    ranks = ComparedRanks(2)

    def refuse() -> Store:
        raise RuntimeError("no server")

    rank = ComparedRank(0, ranks.clock, refuse, FakeGroup((0, 1))).connect()
    rank.run(3)
    rank.poll()

    assert rank.failures("store") == 1
    assert rank.fail_open.failures == {}
    assert rank.milliseconds(EXPOSED, "dp") == pytest.approx(3)


def test_a_store_that_is_gone_first_at_the_end_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = ComparedRanks(2, monitored=1)
    store = StoreOfRankZero()
    rank = ComparedRank(1, ranks.clock, lambda: store, FakeGroup((0, 1)))
    rank.thread.start()
    rank.thread.report_now()
    assert eventually(lambda: store.num_keys() > 0)
    rank.run(10)

    with caplog.at_level(logging.INFO):
        rank.thread.stop()

    assert not rank.thread._thread.is_alive()
    assert store.timeouts == [timedelta(seconds=CLOSING_SECONDS)]
    assert rank.failures("store") == 0
    assert rank.milliseconds(EXPOSED, "dp") == pytest.approx(10)
    assert caplog.records == []


class StoreOfRankZero(HashStore):
    """Gone when rank 0 is, which is when the other ranks begin to close."""

    def __init__(self) -> None:
        super().__init__()
        self.gone = False
        self.timeouts: list[timedelta] = []

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeouts.append(timeout)
        self.gone = True

    def check(self, keys: list[str]) -> bool:
        if self.gone:
            raise RuntimeError("gone")
        return super().check(keys)
