"""The exchange while the store is away, not found yet, or elsewhere: ranks go on and meet again."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from itertools import pairwise

import pytest
from fakes.parties import SECONDS, Parties, Party
from fakes.rank_sets import FakeGroup
from torch.distributed import HashStore, PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Store

from zerowatch.metrics.catalog import communication
from zerowatch.runtime.cross_rank.coordinator_reader import PATIENCE_EXCHANGES
from zerowatch.runtime.cross_rank.cross_rank_thread import CLOSING_SECONDS
from zerowatch.runtime.cross_rank.store_connection import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS
from zerowatch.runtime.cross_rank.store_log import KEPT_TEXTS

TIMEOUT = timedelta(seconds=2)
EXPOSED, WAIT = communication.COMM_EXPOSED_SECONDS, communication.COMM_WAIT_SECONDS


class Outage:
    """Two ranks over a TCPStore that comes and goes."""

    def __init__(self) -> None:
        self.server: TCPStore | None = TCPStore("127.0.0.1", 0, None, True, TIMEOUT, False)
        self.port = self.server.port
        self.parties = Parties(2)
        clock = self.parties.clock
        self.parties.all = [
            Party(rank, clock, self.connect, FakeGroup((0, 1))).open() for rank in (0, 1)
        ]

    def connect(self) -> Store:
        if self.server is None:
            raise RuntimeError("nobody there")
        return PrefixStore("zerowatch", self.server.clone())

    def begin(self) -> None:
        self.server = None

    def end(self) -> None:
        self.server = TCPStore("127.0.0.1", self.port, None, True, TIMEOUT, False)


def test_a_store_that_fails_midway_leaves_each_rank_to_itself() -> None:
    outage = Outage()
    parties = outage.parties
    for party in parties.all:
        party.run(10)
    parties.exchange(times=2)
    for party in parties.all:
        party.run(5)
    outage.begin()
    began = time.monotonic()

    parties.exchange(times=3)

    for party in parties.all:
        assert party.fail_open.failures == {}
        assert party.failures("store") == 1
        assert party.failures("unmatched") == 0
        assert party.milliseconds(EXPOSED, "dp") == pytest.approx(15)
        assert party.exchange.peers == {}
    assert time.monotonic() - began < 30


def test_ranks_are_compared_again_once_the_store_answers_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outage = Outage()
    parties = outage.parties
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            parties[0].run(10)
            parties[1].run(4)
            parties.exchange()
        before = parties[0].milliseconds(WAIT, "dp")
        outage.begin()
        parties.exchange(times=round(FIRST_PAUSE_SECONDS / SECONDS) + 1)
        outage.end()
        parties.exchange(times=round(2 * FIRST_PAUSE_SECONDS / SECONDS) + 1)
        for _ in range(3):
            parties[0].run(10)
            parties[1].run(4)
            parties.exchange(times=2)

    assert before == pytest.approx(18, abs=1e-4)
    assert parties[0].milliseconds(WAIT, "dp") == pytest.approx(36, abs=1e-4)
    assert [party.failures("peer") for party in parties.all] == [0, 0]
    assert [party.failures("store") for party in parties.all] == [2, 2]
    assert [party.fail_open.failures for party in parties.all] == [{}, {}]
    lines = [record.message.partition(" (")[0] for record in caplog.records]
    assert lines == [
        *["the c10d store does not answer"] * 2,
        *["the c10d store answers again: this rank is compared again"] * 2,
    ]


def test_a_rank_that_alone_lost_the_store_joins_the_others_later() -> None:
    parties = Parties(3)
    parties.exchange(times=2 * KEPT_TEXTS)
    parties[0].exchange._connection.lose()
    away = round(FIRST_PAUSE_SECONDS / SECONDS)
    for _ in range(away + PATIENCE_EXCHANGES + 2):
        for party, milliseconds in zip(parties.all, (10, 8, 3), strict=True):
            party.run(milliseconds)
        parties.exchange()
    before = parties[1].milliseconds(WAIT, "dp")
    for party, milliseconds in zip(parties.all, (10, 8, 3), strict=True):
        party.run(milliseconds)
    parties.exchange(times=2)

    assert parties[1].milliseconds(WAIT, "dp") - before == pytest.approx(5, abs=1e-4)
    assert parties[0].failures("peer") == 0


def test_a_store_that_stays_away_is_tried_less_and_less_often() -> None:
    parties = Parties(2)
    tried: list[float] = []

    def refuse() -> Store:
        tried.append(parties.clock.seconds)
        raise RuntimeError("nobody there")

    parties.all = [Party(0, parties.clock, refuse, FakeGroup((0, 1))).open()]

    parties.exchange(times=300)

    pauses = [b - a for a, b in pairwise(tried)]
    assert pauses[:5] == [FIRST_PAUSE_SECONDS, 60, 120, 240, LONGEST_PAUSE_SECONDS]
    assert set(pauses[5:]) == {LONGEST_PAUSE_SECONDS}


def test_ranks_that_meet_elsewhere_begin_anew_there() -> None:
    parties = Parties(2)
    stores = {rank: HashStore() for rank in (0, 1)}  # rank 1 is in what an earlier life left
    moved = {rank: False for rank in (0, 1)}
    parties.all = [
        Party(
            rank,
            parties.clock,
            lambda rank=rank: stores[rank],
            FakeGroup((0, 1)),
            moved=lambda rank=rank: moved.pop(rank, False),
        ).open()
        for rank in (0, 1)
    ]
    for party, milliseconds in zip(parties.all, (10, 4), strict=True):
        party.run(milliseconds)
    parties.exchange(times=2)
    before = parties[0].milliseconds(WAIT, "dp")
    stores[1], moved[1] = stores[0], True
    for _ in range(3):
        for party, milliseconds in zip(parties.all, (10, 4), strict=True):
            party.run(milliseconds)
        parties.exchange(times=2)

    assert before == 0
    assert parties[0].milliseconds(WAIT, "dp") >= 12
    assert [party.failures("peer") for party in parties.all] == [0, 0]


def test_what_was_issued_before_it_was_known_where_to_meet_is_compared() -> None:
    parties = Parties(2)
    stores: list[Store] = []
    parties.all = [
        Party(rank, parties.clock, lambda: stores[0] if stores else None, FakeGroup((0, 1))).open()
        for rank in (0, 1)
    ]
    for party, milliseconds in zip(parties.all, (10, 4), strict=True):
        party.run(milliseconds)
    parties.exchange()
    stores.append(parties.store)
    parties.exchange(times=2)

    assert parties[0].milliseconds(WAIT, "dp") == pytest.approx(6, abs=1e-4)


def test_a_rank_that_does_not_know_where_the_others_meet_counts_alone_and_no_failures() -> None:
    parties = Parties(2)
    parties.all = [Party(0, parties.clock, lambda: None, FakeGroup((0, 1))).open()]
    for _ in range(2 * PATIENCE_EXCHANGES):
        parties[0].run(7)
        parties.exchange()

    assert parties[0].milliseconds(EXPOSED, "dp") == pytest.approx(14 * PATIENCE_EXCHANGES)
    assert [parties[0].failures(reason) for reason in ("store", "unmatched")] == [0, 0]


def test_a_store_that_cannot_be_reached_is_counted_and_no_more() -> None:
    parties = Parties(2)

    def refuse() -> Store:
        raise RuntimeError("nobody there")

    party = Party(0, parties.clock, refuse, FakeGroup((0, 1))).open()
    party.run(3)
    party.look()

    assert party.failures("store") == 1
    assert party.fail_open.failures == {}
    assert party.milliseconds(EXPOSED, "dp") == pytest.approx(3)


def test_a_store_that_is_gone_first_at_the_end_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parties = Parties(2, watched=1)
    store = StoreOfRankZero()
    party = Party(1, parties.clock, lambda: store, FakeGroup((0, 1)))
    party.exchange.start()
    party.exchange.report_now()
    party.run(10)
    store.gone = True

    with caplog.at_level(logging.INFO):
        party.exchange.stop()

    assert not party.exchange._thread.is_alive()
    assert store.timeouts == [timedelta(seconds=CLOSING_SECONDS)]
    assert party.failures("store") == 0
    assert party.milliseconds(EXPOSED, "dp") == pytest.approx(10)
    assert caplog.records == []


class StoreOfRankZero(HashStore):
    """Gone when rank 0 is."""

    def __init__(self) -> None:
        super().__init__()
        self.gone = False
        self.timeouts: list[timedelta] = []

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeouts.append(timeout)

    def check(self, keys: list[str]) -> bool:
        if self.gone:
            raise RuntimeError("gone")
        return super().check(keys)
