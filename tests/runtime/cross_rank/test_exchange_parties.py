"""The exchange as a whole: several ranks, one store, and what may go wrong between them."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from fakes.parties import SECONDS, STUCK_SECONDS, Parties, Party
from fakes.rank_sets import FakeGroup

from zerowatch.metrics.catalog import communication
from zerowatch.runtime.cross_rank.compare_reporter import SECONDS_BETWEEN_LINES
from zerowatch.runtime.cross_rank.coordinator_reader import PATIENCE_EXCHANGES
from zerowatch.runtime.cross_rank.cross_rank_thread import (
    CLOSING_SECONDS,
    NOTICE_IDLE_SECONDS,
    seconds_between_looks,
)
from zerowatch.runtime.cross_rank.store_log import KEPT_TEXTS

EXPOSED, WAIT = communication.COMM_EXPOSED_SECONDS, communication.COMM_WAIT_SECONDS


def test_the_rank_that_came_last_waited_least() -> None:
    parties = Parties(3)
    for party, milliseconds in zip(parties.all, (10, 8, 3), strict=True):
        party.run(milliseconds)

    parties.exchange(times=2)

    waits = [party.milliseconds(WAIT, "dp") for party in parties.all]
    assert waits == pytest.approx([7, 5, 0], abs=1e-5)
    assert [party.fail_open.failures for party in parties.all] == [{}] * 3
    assert [party.failures("unmatched") for party in parties.all] == [0, 0, 0]


def test_a_slow_rank_is_named_by_the_first_and_scored_on_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parties = Parties(4)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            for party in parties.all:
                party.steps(forward=40.0 if party.rank == 2 else 10.0)
            parties.exchange()

    scores = [
        party.recorder.snapshot().value(communication.STRAGGLER_SCORE, "forward")
        for party in parties.all
    ]
    assert scores == pytest.approx([0, 0, 0.03 / 0.05, 0], abs=1e-9)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "rank 2 is slow in forward"
    ]


def test_a_rank_that_is_slow_no_longer_is_told_too_but_not_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parties = Parties(2)
    told = []
    with caplog.at_level(logging.WARNING):
        for slower in (40.0, 40.0, 10.0, 10.0, 40.0, 40.0, 10.0, 10.0, 10.0):
            if len(told) == 8:
                parties.exchange(times=round(SECONDS_BETWEEN_LINES / SECONDS))
            parties[0].steps()
            parties[1].steps(forward=slower)
            parties.exchange()
            told.append(len(caplog.records))

    assert told == [0, 1, 1, 1, 1, 1, 1, 1, 2]
    assert caplog.records[-1].message == "rank 1 is no longer slow in forward"


def test_a_rank_that_skips_a_collective_is_named_and_counted_on_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parties = Parties(2)
    step = ("all_reduce", "all_gather", "barrier")
    for number in range(5):
        for party in parties.all:
            for op in step:
                if not (number == 4 and op == "all_gather" and party.rank == 1):
                    party.run(op=op)
    parties.exchange(times=2)

    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert errors[0].startswith("rank 1 left the common sequence of collectives at call 14")
    assert [
        party.recorder.snapshot().value(communication.COLLECTIVE_MISMATCHES)
        for party in parties.all
    ] == [1, 1]


def test_a_rank_stuck_in_a_collective_still_tells_what_it_issued() -> None:
    parties = Parties(2)
    parties[0].groups[0].issue("all_reduce")
    parties[1].groups[0].issue("barrier")

    parties.exchange(times=2)

    assert parties[0].recorder.snapshot().value(communication.COLLECTIVE_MISMATCHES) == 1


def test_a_peer_that_never_reports_is_left_out_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parties = Parties(3, watched=2)
    for number in range(PATIENCE_EXCHANGES + 3):
        for party, milliseconds in zip(parties.all, (10, 4), strict=True):
            party.run(milliseconds)
        parties.exchange()
        if number == PATIENCE_EXCHANGES - 1:
            before = parties[0].milliseconds(WAIT, "dp")

    left_out = [record for record in caplog.records if "has not reported" in record.message]
    assert before == 0
    assert parties[0].milliseconds(WAIT, "dp") >= 12
    assert [party.failures("peer") for party in parties.all] == [1, 0]
    assert len(left_out) == 1


def test_a_late_joiner_takes_part_from_then_on() -> None:
    parties = Parties(3, watched=2)
    for _ in range(PATIENCE_EXCHANGES + 2):
        for party in parties.all:
            party.run(10)
        parties.exchange()
    joiner = parties.join(2)
    for _ in range(PATIENCE_EXCHANGES + 2):  # its tap was open all the time, its watch was not
        joiner.groups[0].issue()
    joiner = Party(2, parties.clock, lambda: parties.store, joiner.groups[0]).open()
    parties.all.append(joiner)
    parties.exchange()
    before = parties[0].milliseconds(WAIT, "dp")
    for party in parties.all:
        party.run(4 if party is joiner else 10)

    parties.exchange(times=2)

    assert parties[0].milliseconds(WAIT, "dp") - before == pytest.approx(6, abs=1e-4)
    assert joiner.milliseconds(WAIT, "dp") == 0
    assert joiner.milliseconds(EXPOSED, "dp") == pytest.approx(4)
    assert parties[0].recorder.snapshot().value(communication.COLLECTIVE_MISMATCHES) == 0


@pytest.mark.parametrize("still", [0, 2], ids=["the first", "another"])
def test_a_rank_whose_thread_stood_still_for_long_is_matched_again(still: int) -> None:
    parties = Parties(3)
    parties.exchange()
    for number in range(2 * KEPT_TEXTS + 2 * PATIENCE_EXCHANGES):
        for party, milliseconds in zip(parties.all, (4, 10, 10), strict=True):
            party.run(milliseconds)
        stands_still = number < 2 * KEPT_TEXTS
        parties.exchange(*([still] if stands_still else []))
        if stands_still:
            before = parties[2].milliseconds(WAIT, "dp")
    parties.exchange(times=2)

    assert before == 0
    assert parties[2].milliseconds(WAIT, "dp") > 5 * 2 * PATIENCE_EXCHANGES
    assert parties[0].failures("peer") == (still == 2)
    assert parties[2].milliseconds(EXPOSED, "dp") == pytest.approx(
        10 * (2 * KEPT_TEXTS + 2 * PATIENCE_EXCHANGES)
    )
    assert parties[2].recorder.snapshot().value(communication.COLLECTIVE_MISMATCHES) == 0


def test_a_rank_that_compares_nothing_counts_its_costs_and_no_failures() -> None:
    parties = Parties(2)
    alone = Party(0, parties.clock, None, FakeGroup((0, 1))).open()
    parties.all = [alone]
    for _ in range(3):
        alone.run(7)
        parties.exchange()

    assert alone.milliseconds(EXPOSED, "dp") == pytest.approx(21)
    assert alone.failures("unmatched") == 0


def test_groups_first_used_long_after_the_start_are_compared() -> None:
    parties = Parties(2)
    parties.exchange(times=PATIENCE_EXCHANGES + 2)
    for party, milliseconds in zip(parties.all, (10, 4), strict=True):
        late = FakeGroup((0, 1), role="world")
        late.rank_set.key = "late"
        party.groups.append(late)
        late.run(ms=milliseconds)
        parties.exchange(1 - party.rank)  # one after the other

    parties.exchange(times=2)

    assert parties[0].milliseconds(WAIT, "world") == pytest.approx(6, abs=1e-5)
    assert parties[1].failures("unmatched") == 0


def test_two_groups_are_matched_each_by_its_own_numbers() -> None:
    parties = Parties(2)
    for party in parties.all:
        other = FakeGroup((0, 1), role="tp")
        other.rank_set.key = "other"
        party.groups.append(other)
        party.run(10 if party.rank == 0 else 8)
        other.run(ms=3 if party.rank == 0 else 9)

    parties.exchange(times=2)

    waits = [[party.milliseconds(WAIT, role) for role in ("dp", "tp")] for party in parties.all]
    assert waits == [pytest.approx([2, 0], abs=1e-5), pytest.approx([0, 6], abs=1e-5)]


def test_an_idle_job_keeps_in_touch() -> None:
    parties = Parties(3)
    ages = []
    for _ in range(10 * PATIENCE_EXCHANGES):
        parties.exchange()
        ages += [
            party.recorder.snapshot().value(communication.PEER_HEARTBEAT_AGE) or 0.0
            for party in parties.all
        ]

    assert max(ages) <= 1.5 * SECONDS
    assert [party.failures("peer") for party in parties.all] == [0, 0, 0]


def test_a_rank_set_that_its_first_rank_never_used_makes_nobody_silent() -> None:
    parties = Parties(2)
    unused = FakeGroup((0, 1), role="tp")
    unused.rank_set.key = "unused"
    parties[1].groups.append(unused)

    parties.exchange(times=3 * PATIENCE_EXCHANGES)

    age = parties[1].recorder.snapshot().value(communication.PEER_HEARTBEAT_AGE)
    assert age is not None and age <= 1.5 * SECONDS


def test_peers_are_looked_for_only_while_training_does_not_move() -> None:
    parties = Parties(2)
    parties.exchange()
    before = dict(parties[0].exchange.peers)
    parties[1].run()
    parties[0].idle_seconds = STUCK_SECONDS + 1
    parties[1].exchange.tell_of_hang(True)
    parties[1].exchange.pause = lambda: "eval"
    parties.exchange(times=2)

    peers, told = parties[0].exchange.peers, parties[0].exchange.others_hang
    parties[0].idle_seconds = 0.0
    parties.exchange()
    assert before == {}
    assert told
    assert (parties[0].exchange.peers, parties[0].exchange.others_hang) == ({}, False)
    assert {rank: beat.host for rank, beat in peers.items()} == {0: "host-0", 1: "host-1"}
    assert list(peers[1].arrived.values()) == [1]
    assert (peers[0].pause, peers[1].pause) == (None, "eval")


def test_stopping_counts_the_last_calls_on_all_ranks() -> None:
    parties = Parties(2, threads=True)
    for party, milliseconds in zip(parties.all, (10, 4), strict=True):
        party.run(milliseconds)
    began = time.monotonic()

    stopping = [threading.Thread(target=party.exchange.stop) for party in parties.all]
    for thread in stopping:
        thread.start()
    for thread in stopping:
        thread.join()

    assert time.monotonic() - began < 10 * CLOSING_SECONDS
    assert parties[0].milliseconds(WAIT, "dp") == pytest.approx(6, abs=1e-5)
    assert [party.milliseconds(EXPOSED, "dp") for party in parties.all] == pytest.approx([10, 4])


def test_stopping_alone_waits_but_not_for_ever_and_counts_all_the_same() -> None:
    parties = Parties(2, watched=1, threads=True)
    parties[0].run(10)
    began = time.monotonic()

    parties[0].exchange.stop()
    parties[0].exchange.stop()

    assert CLOSING_SECONDS <= time.monotonic() - began < 10 * CLOSING_SECONDS
    assert parties[0].milliseconds(EXPOSED, "dp") == pytest.approx(10)
    assert parties[0].failures("unmatched") == 0


def test_signs_of_life_come_often_even_where_exchanges_are_rare() -> None:
    assert [seconds_between_looks(seconds) for seconds in (0.5, 5.0, 120.0)] == [0.1, 1.0, 2.0]


def test_a_rank_that_is_told_of_a_hang_looks_at_once_who_is_alive_whatever_its_own_limit() -> None:
    parties = Parties(2)
    parties[1].idle_seconds = NOTICE_IDLE_SECONDS + 1
    parties.exchange()
    before = dict(parties[1].exchange.peers)
    parties[0].exchange.tell_of_hang(True)
    parties.exchange()

    assert before == {}
    assert parties[1].exchange.others_hang
    assert parties[1].exchange.peers.keys() == {0, 1}


def test_stopping_what_was_never_started_is_harmless() -> None:
    Parties(1)[0].exchange.stop()
