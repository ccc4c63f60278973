"""A hundred and thirty ranks' exchanges in one process, over a real TCPStore: three blocks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from fakes.parties import SECONDS, Parties, Party
from fakes.rank_sets import FakeGroup
from torch.distributed import PrefixStore, TCPStore

from zerowatch.metrics.catalog import communication

NUM_RANKS, SLOW, LATE, ASTRAY = 130, 101, 127, 77


@pytest.fixture(scope="module")
def crowd() -> Iterator[Parties]:
    """What all know after some exchanges in which one is slow, one late, and one goes astray."""
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), False)
    client = PrefixStore("zerowatch", server.clone())
    crowd = Parties(0)
    members = tuple(range(NUM_RANKS))
    crowd.all = [
        Party(rank, crowd.clock, lambda: client, FakeGroup(members)).open() for rank in members
    ]
    for party in crowd.all:
        party.steps()  # the warm-up is among these
    for number in range(3):
        for party in crowd.all:
            party.steps(forward=40.0 if party.rank == SLOW else 10.0)
            party.run(4.0 if party.rank == LATE else 10.0)
            party.run(op="barrier" if (number, party.rank) == (2, ASTRAY) else "all_reduce")
        crowd.exchange()
    for party in crowd.all:
        party.idle_seconds = 60.0
    crowd.exchange(times=3)
    yield crowd


def values(crowd: Parties, spec: communication.MetricSpec, *labels: str) -> list[float | None]:
    return [party.recorder.snapshot().value(spec, *labels) for party in crowd.all]


def test_each_rank_learns_how_long_it_waited_for_the_late_one(crowd: Parties) -> None:
    waits = [1000 * (wait or 0) for wait in values(crowd, communication.COMM_WAIT_SECONDS, "dp")]

    assert waits == pytest.approx([0 if rank == LATE else 18 for rank in range(130)], abs=0.01)


def test_each_rank_learns_its_own_score(crowd: Parties) -> None:
    scores = values(crowd, communication.STRAGGLER_SCORE, "forward")

    assert scores[SLOW] == pytest.approx(30 / 50)
    assert {score for rank, score in enumerate(scores) if rank != SLOW} == {0.0}


def test_the_one_that_went_astray_is_counted_by_all(crowd: Parties) -> None:
    assert values(crowd, communication.COLLECTIVE_MISMATCHES) == [1] * NUM_RANKS


def test_nobody_fails_or_is_taken_for_silent(crowd: Parties) -> None:
    ages = values(crowd, communication.PEER_HEARTBEAT_AGE)

    assert max(age or 0.0 for age in ages) <= 2 * SECONDS
    assert [party.fail_open.failures for party in crowd.all] == [{}] * NUM_RANKS
    for reason in ("store", "peer"):
        assert [party.failures(reason) for party in crowd.all] == [0] * NUM_RANKS


def test_each_rank_that_stands_still_knows_where_all_others_are(crowd: Parties) -> None:
    for party in crowd.all:
        peers = party.exchange.peers
        assert peers.keys() == set(range(NUM_RANKS))
        assert {beat.age_seconds for beat in peers.values()} == {0}
        assert {number for beat in peers.values() for number in beat.arrived.values()} == {6}
