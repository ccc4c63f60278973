"""Tests of calls that cannot be compared: exposed, without a cause, no part of the link."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import pytest
from fakes.accounted_rank import PATIENCE, AccountedRank
from fakes.comparison_threads import INTERVAL_SECONDS, ComparedRank, ComparedRanks
from fakes.rank_sets import FakeGroup

from zerowatch.metrics.catalog import communication
from zerowatch.runtime.cross_rank.comparison_thread import POLLS_PER_EXCHANGE
from zerowatch.runtime.cross_rank.divergence import Divergence
from zerowatch.runtime.cross_rank.exchange.rank_messages import CompareResult

EXPOSED, WAIT = communication.COMM_EXPOSED_SECONDS, communication.COMM_WAIT_SECONDS
TRANSFER = communication.COMM_TRANSFER_SECONDS
LATENCY, BANDWIDTH = communication.COMM_LINK_LATENCY, communication.COMM_LINK_BANDWIDTH
BUS_BANDWIDTH = communication.COMM_BUS_BANDWIDTH
NAN = math.nan


@pytest.fixture
def rank() -> AccountedRank:
    return AccountedRank(FakeGroup((0, 1)))


def measure_link(rank: AccountedRank) -> None:
    """Let the rank know its link: 2 ms, and 1 GB/s of wire bytes beyond that."""
    for size, milliseconds in ((1_000, 2), (16_000_000, 10)):
        rank.group.run("all_gather", size, milliseconds)
    report = rank.report()
    rank.match(report.first_timed, *(1000 * report.durations).tolist())
    rank.accounting.publish()


def published_causes(rank: AccountedRank) -> set[tuple[str, ...]]:
    rank.accounting.publish()
    return set(rank.recorder.snapshot().values.get(communication.COMM_CAUSE_SECONDS, {}))


def test_after_a_divergence_calls_are_exposed_and_unmatched_and_the_link_is_unknown(
    rank: AccountedRank,
) -> None:
    measure_link(rank)
    rank.causes()
    before = {spec: rank.value(spec, "dp") for spec in (WAIT, TRANSFER)}
    known = [rank.value(spec, "dp") > 0 for spec in (LATENCY, BANDWIDTH)]
    causes, exposed = rank.causes(), rank.value(EXPOSED, "dp")
    for _ in range(3):
        rank.group.run("all_reduce", 4_000_000, 500)
        rank.group.run("broadcast", 4_000_000, 500)
    rank.report()
    divergence = Divergence(sequence=3, issued={0: "a", 1: "b"}, diverged=(0, 1))
    rank.accounting.match(
        rank.group.rank_set,
        CompareResult(
            first_call=3, min_durations=np.full(4, NAN, np.float32), divergence=divergence
        ),
    )
    rank.match(7, NAN, NAN)

    assert rank.value(EXPOSED, "dp") - exposed == pytest.approx(3000)
    assert {spec: rank.value(spec, "dp") for spec in before} == before
    assert known == [True, True]
    assert [rank.value(spec, "dp") for spec in (LATENCY, BANDWIDTH)] == [0, 0]
    assert rank.causes() == causes
    assert rank.accounting.unmatched == 2
    assert rank.value(BUS_BANDWIDTH, "all_reduce", "dp") == 0


def test_a_result_with_a_divergence_is_counted_up_to_there(rank: AccountedRank) -> None:
    measure_link(rank)
    wait = rank.value(WAIT, "dp")
    for _ in range(2):
        rank.group.run("all_gather", 1000, 5)
    rank.report()

    rank.match(3, 2, NAN)

    assert rank.value(WAIT, "dp") - wait == pytest.approx(3, abs=1e-4)
    assert rank.accounting.unmatched == 1


def test_without_comparison_exposed_seconds_have_no_cause(rank: AccountedRank) -> None:
    rank.is_compared = False
    for op in ("barrier", "all_reduce", "broadcast", "send"):
        rank.group.run(op, 0 if op == "barrier" else 1000, 9000)
    rank.report()
    rank.expire(0.0)

    assert rank.value(EXPOSED, "dp") == pytest.approx(36_000)
    assert (rank.value(WAIT, "dp"), rank.value(TRANSFER, "dp")) == (0, 0)
    assert published_causes(rank) == set()


def test_when_comparison_ends_causes_stop_and_exposed_seconds_go_on(
    rank: AccountedRank,
) -> None:
    measure_link(rank)
    causes, exposed = rank.causes(), rank.value(EXPOSED, "dp")
    rank.is_compared = False
    rank.group.run(ms=7)
    rank.report()
    rank.expire(0.0)

    assert rank.value(EXPOSED, "dp") - exposed == pytest.approx(7)
    assert rank.causes() == causes


def test_without_a_result_there_is_no_cause_until_one_comes(rank: AccountedRank) -> None:
    rank.group.run(ms=9000)
    rank.report()
    rank.clock.seconds += PATIENCE
    rank.expire(PATIENCE)
    rank.group.run("send", ms=1000)
    rank.report()
    silent = rank.value(EXPOSED, "dp"), published_causes(rank)
    rank.group.run(ms=5)
    rank.report()
    rank.match(2, 2)

    assert silent == (pytest.approx(10_000), set())
    assert sum(rank.causes().values()) == pytest.approx(5)


def test_a_rank_without_monitored_peers_has_no_causes(rank: AccountedRank) -> None:
    rank.group.run(ms=9000)
    rank.group.run("broadcast", ms=9000)
    rank.report()

    rank.match(1, NAN, NAN)

    assert rank.value(EXPOSED, "dp") == pytest.approx(18_000)
    assert published_causes(rank) == set()


def test_a_group_of_one_has_causes_without_comparison() -> None:
    rank = AccountedRank(FakeGroup((0,)))
    rank.is_compared = False
    rank.group.run(ms=3)
    rank.report()

    assert rank.causes() == pytest.approx(
        {"imbalance": 0, "latency": 3, "redundancy": 0, "bandwidth": 0}
    )


def test_an_estimated_barrier_is_latency_and_for_the_rest_imbalance(rank: AccountedRank) -> None:
    measure_link(rank)
    before = rank.causes()
    rank.group.run("barrier", 0, 900)
    rank.report()
    rank.expire(0.0)
    after = rank.causes()

    assert {name: after[name] - before[name] for name in after} == pytest.approx(
        {"imbalance": 898, "latency": 2, "redundancy": 0, "bandwidth": 0}, abs=0.01
    )


def test_a_barrier_without_a_known_link_is_imbalance(rank: AccountedRank) -> None:
    rank.group.run("barrier", 0, 900)
    rank.report()
    rank.expire(0.0)

    assert rank.causes() == pytest.approx(
        {"imbalance": 900, "latency": 0, "redundancy": 0, "bandwidth": 0}
    )


def test_a_slow_barrier_of_all_is_latency(rank: AccountedRank) -> None:
    measure_link(rank)
    before = rank.causes()
    rank.group.run("barrier", 0, 50)
    rank.report()
    rank.match(3, 40)
    after = rank.causes()

    assert {name: after[name] - before[name] for name in after} == pytest.approx(
        {"imbalance": 10, "latency": 40, "redundancy": 0, "bandwidth": 0}, abs=0.01
    )


def test_a_call_far_larger_than_any_before_is_no_imbalance_without_a_bandwidth(
    rank: AccountedRank,
) -> None:
    for _ in range(3):
        rank.group.run("all_reduce", 1000, 2)
    rank.report()
    rank.match(1, 2, 2, 2)
    rank.accounting.publish()
    rank.group.run("broadcast", 10**9, 200)
    rank.report()
    rank.match(4, 200)

    assert rank.value(WAIT, "dp") == pytest.approx(0, abs=1e-4)
    assert rank.causes()["imbalance"] == pytest.approx(0, abs=1e-4)


def test_a_rooted_call_uses_the_link_from_the_same_result(
    rank: AccountedRank,
) -> None:
    rank.group.run("broadcast", 1000, 50)
    rank.group.run("all_gather", 1000, 2)
    rank.report()

    rank.match(1, 50, 2)

    assert rank.value(WAIT, "dp") == pytest.approx(48, abs=1e-3)


@pytest.mark.parametrize("op", ["all_reduce", "broadcast"])
def test_a_collective_without_a_number_is_no_message(rank: AccountedRank, op: str) -> None:
    measure_link(rank)
    latency, bandwidth = rank.value(LATENCY, "dp"), rank.value(BANDWIDTH, "dp")
    wait = rank.value(WAIT, "dp")
    for _ in range(5):  # from a thread of the script's own
        call = rank.group.issue(op, 8_000_000)
        call.sequence = 0
        rank.group.settle(call, 1000)
    rank.report()

    link_ms = 2 + (16_000_000 if op == "all_reduce" else 8_000_000) / 2 / 1e6
    assert rank.value(WAIT, "dp") - wait == pytest.approx(5 * (1000 - link_ms), rel=1e-3)
    assert rank.value(LATENCY, "dp") == latency
    assert rank.value(BANDWIDTH, "dp") == bandwidth


def test_an_all_to_all_does_not_change_the_link_as_sizes_may_differ(
    rank: AccountedRank,
) -> None:
    measure_link(rank)
    bandwidth = rank.value(BANDWIDTH, "dp")
    for _ in range(20):  # this rank has ten times as much to send as the quickest
        rank.group.run("all_to_all", 40_000_000, 22)
    rank.report()
    rank.match(3, *[4.0] * 20)

    assert rank.value(BANDWIDTH, "dp") == bandwidth
    assert rank.value(BUS_BANDWIDTH, "all_to_all", "dp") == 0
    assert rank.value(WAIT, "dp") == pytest.approx(20 * 18, rel=1e-3)


def test_calls_dropped_before_they_were_reported_are_still_exposed(
    rank: AccountedRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "zerowatch.runtime.cross_rank.accounting.call_sequence.MAX_PENDING_VALUES", 10
    )
    for _ in range(12):
        rank.group.run(ms=3)

    rank.accounting.poll(is_compared=True)
    rank.expire(PATIENCE)

    assert rank.value(EXPOSED, "dp") == pytest.approx(6)
    assert rank.accounting.unmatched == 1


def test_one_extra_call_on_one_rank_ends_the_comparison_of_that_group_only() -> None:
    ranks = ComparedRanks(2)
    for rank, milliseconds in zip(ranks.all, (10, 4), strict=True):
        other = FakeGroup((0, 1), role="world")
        other.rank_set.key = "other"
        rank.groups.append(other)
        for _ in range(5):
            rank.run(milliseconds)
    ranks.exchange(times=2)
    ranks[1].run(4, op="barrier")
    for _ in range(3):
        for rank, milliseconds in zip(ranks.all, (10, 4), strict=True):
            rank.run(milliseconds)
            rank.run(3 * milliseconds, op="all_gather")
            rank.groups[1].run(ms=milliseconds)
        ranks.exchange()
    ranks.exchange()

    waits = [ranks[0].milliseconds(WAIT, role) for role in ("dp", "world")]
    assert waits == pytest.approx([5 * 6, 3 * 6], abs=1e-3)
    assert ranks[0].milliseconds(EXPOSED, "dp") == pytest.approx(5 * 10 + 3 * 40)
    assert min(rank.failures("unmatched") for rank in ranks.all) >= 3
    assert [ranks[1].milliseconds(LATENCY, role) for role in ("dp", "world")] == pytest.approx(
        [0, 4], rel=0.01
    )


def test_more_calls_than_are_kept_are_all_compared_as_each_poll_reads_them() -> None:
    ranks = ComparedRanks(2)
    for rank in ranks.all:
        rank.groups[0].rank_set.recent = deque(maxlen=64)
    for _ in range(3 * POLLS_PER_EXCHANGE):
        for rank, milliseconds in zip(ranks.all, (10, 4), strict=True):
            for _ in range(40):
                rank.run(milliseconds)
            rank.poll()
        ranks.clock.seconds += INTERVAL_SECONDS / POLLS_PER_EXCHANGE
    ranks.exchange(times=2)

    assert ranks[0].milliseconds(WAIT, "dp") == pytest.approx(
        3 * POLLS_PER_EXCHANGE * 40 * 6, rel=1e-5
    )
    assert [rank.failures("unmatched") for rank in ranks.all] == [0, 0]


def test_a_rank_that_compares_nothing_has_no_causes() -> None:
    ranks = ComparedRanks(2)
    alone = ComparedRank(0, ranks.clock, None, FakeGroup((0, 1))).connect()
    ranks.all = [alone]
    alone.run(9000, op="barrier", size=0)
    ranks.exchange()

    assert alone.milliseconds(EXPOSED, "dp") == pytest.approx(9000)
    assert alone.recorder.snapshot().values.get(communication.COMM_CAUSE_SECONDS, {}) == {}
