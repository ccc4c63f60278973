"""What nobody can compare gets no cause, teaches nothing, and is still counted as exposed."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import pytest
from fakes.parties import SECONDS, Parties, Party
from fakes.rank_books import PATIENCE, Rank
from fakes.rank_sets import FakeGroup

from zerowatch.metrics.catalog import communication
from zerowatch.runtime.cross_rank.compare_result import CompareResult
from zerowatch.runtime.cross_rank.cross_rank_thread import LOOKS_PER_EXCHANGE
from zerowatch.runtime.cross_rank.divergence import Divergence

EXPOSED, WAIT = communication.COMM_EXPOSED_SECONDS, communication.COMM_WAIT_SECONDS
TRANSFER = communication.COMM_TRANSFER_SECONDS
LATENCY, BANDWIDTH = communication.COMM_LINK_LATENCY, communication.COMM_LINK_BANDWIDTH
BUS_BANDWIDTH = communication.COMM_BUS_BANDWIDTH
NAN = math.nan


@pytest.fixture
def rank() -> Rank:
    return Rank(FakeGroup((0, 1)))


def teach(rank: Rank) -> None:
    """Let the rank know its link: 2 ms, and 1 GB/s of wire bytes beyond that."""
    for size, milliseconds in ((1_000, 2), (16_000_000, 10)):
        rank.group.run("all_gather", size, milliseconds)
    told = rank.tell()
    rank.learn(told.first_timed, *(1000 * told.durations).tolist())
    rank.books.publish()


def causes_told(rank: Rank) -> set[tuple[str, ...]]:
    rank.books.publish()
    return set(rank.recorder.snapshot().values.get(communication.COMM_CAUSE_SECONDS, {}))


def test_after_a_divergence_calls_are_exposed_unmatched_and_teach_nothing(rank: Rank) -> None:
    teach(rank)
    rank.causes()
    before = {spec: rank.value(spec, "dp") for spec in (WAIT, TRANSFER, LATENCY, BANDWIDTH)}
    causes, exposed = rank.causes(), rank.value(EXPOSED, "dp")
    for _ in range(3):
        rank.group.run("all_reduce", 4_000_000, 500)
        rank.group.run("broadcast", 4_000_000, 500)
    rank.tell()
    divergence = Divergence(sequence=3, issued={0: "a", 1: "b"}, named=(0, 1))
    rank.books.match(
        rank.group.rank_set,
        CompareResult(first=3, least=np.full(4, NAN, np.float32), divergence=divergence),
    )
    rank.learn(7, NAN, NAN)

    assert rank.value(EXPOSED, "dp") - exposed == pytest.approx(3000)
    assert {spec: rank.value(spec, "dp") for spec in before} == before
    assert rank.causes() == causes
    assert rank.books.unmatched == 2
    assert rank.value(BUS_BANDWIDTH, "all_reduce", "dp") == 0


def test_a_verdict_in_which_the_ranks_part_is_counted_up_to_there(rank: Rank) -> None:
    teach(rank)
    wait = rank.value(WAIT, "dp")
    for _ in range(2):
        rank.group.run("all_gather", 1000, 5)
    rank.tell()

    rank.learn(3, 2, NAN)

    assert rank.value(WAIT, "dp") - wait == pytest.approx(3, abs=1e-4)
    assert rank.books.unmatched == 1


def test_without_comparison_exposed_seconds_have_no_cause(rank: Rank) -> None:
    rank.compares = False
    for op in ("barrier", "all_reduce", "broadcast", "send"):
        rank.group.run(op, 0 if op == "barrier" else 1000, 9000)
    rank.tell()
    rank.books.give_up(0.0)

    assert rank.value(EXPOSED, "dp") == pytest.approx(36_000)
    assert (rank.value(WAIT, "dp"), rank.value(TRANSFER, "dp")) == (0, 0)
    assert causes_told(rank) == set()


def test_when_comparison_ends_causes_stand_still_and_exposed_seconds_go_on(rank: Rank) -> None:
    teach(rank)
    causes, exposed = rank.causes(), rank.value(EXPOSED, "dp")
    rank.compares = False
    rank.group.run(ms=7)
    rank.tell()
    rank.books.give_up(0.0)

    assert rank.value(EXPOSED, "dp") - exposed == pytest.approx(7)
    assert rank.causes() == causes


def test_where_no_answer_comes_there_is_no_cause_until_one_comes(rank: Rank) -> None:
    rank.group.run(ms=9000)
    rank.tell()
    rank.clock.seconds += PATIENCE
    rank.books.give_up(PATIENCE)
    rank.group.run("send", ms=1000)
    rank.tell()
    silent = rank.value(EXPOSED, "dp"), causes_told(rank)
    rank.group.run(ms=5)
    rank.tell()
    rank.learn(2, 2)

    assert silent == (pytest.approx(10_000), set())
    assert sum(rank.causes().values()) == pytest.approx(5)


def test_a_rank_without_watched_peers_tells_no_cause(rank: Rank) -> None:
    rank.group.run(ms=9000)
    rank.group.run("broadcast", ms=9000)
    rank.tell()

    rank.learn(1, NAN, NAN)

    assert rank.value(EXPOSED, "dp") == pytest.approx(18_000)
    assert causes_told(rank) == set()


def test_a_group_of_one_has_causes_though_nobody_is_compared() -> None:
    rank = Rank(FakeGroup((0,)))
    rank.compares = False
    rank.group.run(ms=3)
    rank.tell()

    assert rank.causes() == pytest.approx(
        {"imbalance": 0, "latency": 3, "redundancy": 0, "bandwidth": 0}
    )


def test_a_barrier_counted_alone_is_latency_and_for_the_rest_imbalance(rank: Rank) -> None:
    teach(rank)
    before = rank.causes()
    rank.group.run("barrier", 0, 900)
    rank.tell()
    rank.books.give_up(0.0)
    after = rank.causes()

    assert {name: after[name] - before[name] for name in after} == pytest.approx(
        {"imbalance": 898, "latency": 2, "redundancy": 0, "bandwidth": 0}, abs=0.01
    )


def test_a_barrier_of_which_nothing_is_known_is_imbalance(rank: Rank) -> None:
    rank.group.run("barrier", 0, 900)
    rank.tell()
    rank.books.give_up(0.0)

    assert rank.causes() == pytest.approx(
        {"imbalance": 900, "latency": 0, "redundancy": 0, "bandwidth": 0}
    )


def test_a_slow_barrier_of_all_is_latency(rank: Rank) -> None:
    teach(rank)
    before = rank.causes()
    rank.group.run("barrier", 0, 50)
    rank.tell()
    rank.learn(3, 40)
    after = rank.causes()

    assert {name: after[name] - before[name] for name in after} == pytest.approx(
        {"imbalance": 10, "latency": 40, "redundancy": 0, "bandwidth": 0}, abs=0.01
    )


def test_a_call_far_larger_than_any_seen_is_no_imbalance_while_no_bandwidth_is_known(
    rank: Rank,
) -> None:
    for _ in range(3):
        rank.group.run("all_reduce", 1000, 2)
    rank.tell()
    rank.learn(1, 2, 2, 2)
    rank.books.publish()
    rank.group.run("broadcast", 10**9, 200)
    rank.tell()
    rank.learn(4, 200)

    assert rank.value(WAIT, "dp") == pytest.approx(0, abs=1e-4)
    assert rank.causes()["imbalance"] == pytest.approx(0, abs=1e-4)


def test_a_rooted_call_is_judged_by_the_calls_that_are_answered_with_it(rank: Rank) -> None:
    rank.group.run("broadcast", 1000, 50)
    rank.group.run("all_gather", 1000, 2)
    rank.tell()

    rank.learn(1, 50, 2)

    assert rank.value(WAIT, "dp") == pytest.approx(48, abs=1e-3)


@pytest.mark.parametrize("op", ["all_reduce", "broadcast"])
def test_a_collective_without_a_number_is_no_message(rank: Rank, op: str) -> None:
    teach(rank)
    latency, bandwidth = rank.value(LATENCY, "dp"), rank.value(BANDWIDTH, "dp")
    wait = rank.value(WAIT, "dp")
    for _ in range(5):  # from a thread of the script's own
        call = rank.group.issue(op, 8_000_000)
        call.sequence = 0
        rank.group.settle(call, 1000)
    rank.tell()

    link_ms = 2 + (16_000_000 if op == "all_reduce" else 8_000_000) / 2 / 1e6
    assert rank.value(WAIT, "dp") - wait == pytest.approx(5 * (1000 - link_ms), rel=1e-3)
    assert rank.value(LATENCY, "dp") == latency
    assert rank.value(BANDWIDTH, "dp") == bandwidth


def test_an_all_to_all_teaches_nothing_as_members_may_give_different_sizes(rank: Rank) -> None:
    teach(rank)
    bandwidth = rank.value(BANDWIDTH, "dp")
    for _ in range(20):  # this rank has ten times as much to send as the quickest
        rank.group.run("all_to_all", 40_000_000, 22)
    rank.tell()
    rank.learn(3, *[4.0] * 20)

    assert rank.value(BANDWIDTH, "dp") == bandwidth
    assert rank.value(BUS_BANDWIDTH, "all_to_all", "dp") == 0
    assert rank.value(WAIT, "dp") == pytest.approx(20 * 18, rel=1e-3)


def test_what_is_dropped_before_it_was_told_is_exposed_all_the_same(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zerowatch.runtime.cross_rank.call_sequence.MOST_VALUES", 10)
    for _ in range(12):
        rank.group.run(ms=3)

    rank.books.follow()
    rank.books.give_up(PATIENCE)

    assert rank.value(EXPOSED, "dp") == pytest.approx(6)
    assert rank.books.unmatched == 1


def test_one_call_too_many_on_one_rank_ends_the_comparing_of_that_group_only() -> None:
    parties = Parties(2)
    for party, milliseconds in zip(parties.all, (10, 4), strict=True):
        other = FakeGroup((0, 1), role="world")
        other.rank_set.key = "other"
        party.groups.append(other)
        for _ in range(5):
            party.run(milliseconds)
    parties.exchange(times=2)
    parties[1].run(4, op="barrier")
    for _ in range(3):
        for party, milliseconds in zip(parties.all, (10, 4), strict=True):
            party.run(milliseconds)
            party.run(3 * milliseconds, op="all_gather")
            party.groups[1].run(ms=milliseconds)
        parties.exchange()
    parties.exchange()

    waits = [parties[0].milliseconds(WAIT, role) for role in ("dp", "world")]
    assert waits == pytest.approx([5 * 6, 3 * 6], abs=1e-3)
    assert parties[0].milliseconds(EXPOSED, "dp") == pytest.approx(5 * 10 + 3 * 40)
    assert min(party.failures("unmatched") for party in parties.all) >= 3
    assert parties[1].milliseconds(LATENCY, "dp") == pytest.approx(4, rel=0.01)


def test_more_calls_than_are_kept_are_compared_whole_as_each_look_takes_them() -> None:
    parties = Parties(2)
    for party in parties.all:
        party.groups[0].rank_set.recent = deque(maxlen=64)
    for _ in range(3 * LOOKS_PER_EXCHANGE):
        for party, milliseconds in zip(parties.all, (10, 4), strict=True):
            for _ in range(40):
                party.run(milliseconds)
            party.look()
        parties.clock.seconds += SECONDS / LOOKS_PER_EXCHANGE
    parties.exchange(times=2)

    assert parties[0].milliseconds(WAIT, "dp") == pytest.approx(
        3 * LOOKS_PER_EXCHANGE * 40 * 6, rel=1e-5
    )
    assert [party.failures("unmatched") for party in parties.all] == [0, 0]


def test_a_rank_that_compares_nothing_tells_no_cause() -> None:
    parties = Parties(2)
    alone = Party(0, parties.clock, None, FakeGroup((0, 1))).open()
    parties.all = [alone]
    alone.run(9000, op="barrier", size=0)
    parties.exchange()

    assert alone.milliseconds(EXPOSED, "dp") == pytest.approx(9000)
    assert alone.recorder.snapshot().values.get(communication.COMM_CAUSE_SECONDS, {}) == {}
