"""Tests with the threads of 130 ranks in one process, over a real TCPStore: three blocks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from fakes.comparison_threads import INTERVAL_SECONDS, ComparedRank, ComparedRanks
from fakes.rank_sets import FakeGroup
from torch.distributed import PrefixStore, TCPStore

from zerowatch.metrics.catalog import communication
from zerowatch.metrics.catalog.spec import MetricSpec

NUM_RANKS, SLOW, LATE, DIVERGED = 130, 101, 127, 77


@pytest.fixture(scope="module")
def crowd() -> Iterator[ComparedRanks]:
    """The ranks after some exchanges in which one is slow, one late, and one diverges."""
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), False)
    client = PrefixStore("zerowatch", server.clone())
    crowd = ComparedRanks(0)
    members = tuple(range(NUM_RANKS))
    crowd.all = [
        ComparedRank(rank, crowd.clock, lambda: client, FakeGroup(members)).connect()
        for rank in members
    ]
    for rank in crowd.all:
        rank.steps()  # the warm-up is among these
    for number in range(3):
        for rank in crowd.all:
            rank.steps(forward=40.0 if rank.rank == SLOW else 10.0)
            rank.run(4.0 if rank.rank == LATE else 10.0)
            rank.run(op="barrier" if (number, rank.rank) == (2, DIVERGED) else "all_reduce")
        crowd.exchange()
    for rank in crowd.all:
        rank.phase_timer.seconds = 60.0
    crowd.exchange(times=3)
    yield crowd


def values(crowd: ComparedRanks, spec: MetricSpec, *labels: str) -> list[float | None]:
    return [rank.recorder.snapshot().value(spec, *labels) for rank in crowd.all]


def test_each_rank_learns_how_long_it_waited_for_the_late_one(crowd: ComparedRanks) -> None:
    waits = [1000 * (wait or 0) for wait in values(crowd, communication.COMM_WAIT_SECONDS, "dp")]

    assert waits == pytest.approx([0 if rank == LATE else 18 for rank in range(130)], abs=0.01)


def test_each_rank_learns_its_own_score(crowd: ComparedRanks) -> None:
    scores = values(crowd, communication.STRAGGLER_SCORE, "forward")

    assert scores[SLOW] == pytest.approx(30 / 50)
    assert {score for rank, score in enumerate(scores) if rank != SLOW} == {0.0}


def test_a_divergence_is_counted_by_all(crowd: ComparedRanks) -> None:
    assert values(crowd, communication.COLLECTIVE_MISMATCHES) == [1] * NUM_RANKS


def test_no_rank_fails_or_counts_as_silent(crowd: ComparedRanks) -> None:
    ages = values(crowd, communication.PEER_HEARTBEAT_AGE)

    assert max(age or 0.0 for age in ages) <= 2 * INTERVAL_SECONDS
    assert [rank.fail_open.failures for rank in crowd.all] == [{}] * NUM_RANKS
    for reason in ("store", "peer"):
        assert [rank.failures(reason) for rank in crowd.all] == [0] * NUM_RANKS


def test_each_stuck_rank_has_the_heartbeats_of_all_others(crowd: ComparedRanks) -> None:
    for rank in crowd.all:
        peers = rank.thread.peers
        assert peers.keys() == set(range(NUM_RANKS))
        assert {beat.age_seconds for beat in peers.values()} == {0}
        assert {number for beat in peers.values() for number in beat.issued.values()} == {6}
