"""Signs of life: who is alive is told by counts that go on, and few questions are asked."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from fakes.clock import FakeClock
from fakes.connections import connected
from torch.distributed import HashStore

from zerowatch.runtime.cross_rank.coordinator import BLOCK_SIZE
from zerowatch.runtime.cross_rank.heartbeats import (
    NOTICE_SECONDS,
    READINGS_TO_BELIEVE,
    SECONDS_BETWEEN_READINGS,
    HeartbeatTable,
)

STUCK_SECONDS = 30.0
LOOK_SECONDS = 1.0


class CountingStore(HashStore):
    """Counts the questions and the texts of signs of life that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.checks = self.texts = 0

    def check(self, keys: list[str]) -> bool:
        self.checks += 1
        return super().check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.texts += len(keys)
        return super().multi_get(keys)


class Job:
    """Some ranks, of which some beat and some look."""

    def __init__(self, num_ranks: int) -> None:
        random.seed(1)
        self.clock = FakeClock()
        self.store = CountingStore()
        self.ranks = range(num_ranks)
        self.peers = [self.new_peers(rank) for rank in self.ranks]
        self.silent: set[int] = set()

    def new_peers(self, rank: int) -> HeartbeatTable:
        store = connected(self.store, self.clock)
        return HeartbeatTable(store, rank, f"host-{rank}", STUCK_SECONDS, self.clock)

    def look(self, seconds: float, *looking: int) -> None:
        for _ in range(round(seconds / LOOK_SECONDS)):
            for peers in self.peers:
                if peers._rank not in self.silent:
                    peers.beat({"g": 7 + peers._rank}, "eval" if peers._rank == 1 else None)
            for rank in looking or self.ranks:
                if rank not in self.silent:
                    self.peers[rank].look(self.ranks, is_stuck=True)
            self.clock.seconds += LOOK_SECONDS

    def age(self, of: int, *, seen_by: int = 0) -> float | None:
        return self.peers[seen_by].beats[of].age_seconds


def test_signs_of_life_are_read_of_those_that_left_any() -> None:
    job = Job(3)
    job.silent = {2}

    job.look(2)

    assert {rank: (b.host, b.arrived, b.pause) for rank, b in job.peers[0].beats.items()} == {
        0: ("host-0", {"g": 7}, None),
        1: ("host-1", {"g": 8}, "eval"),
    }


def test_an_age_is_known_at_the_second_reading_whatever_the_hosts_clocks_say() -> None:
    job = Job(3)
    job.look(1)
    at_first = job.age(1)
    job.silent = {2}
    job.look(30)

    assert at_first is None
    assert job.age(1) == 0
    assert job.age(2) == pytest.approx(30, abs=1.6 * SECONDS_BETWEEN_READINGS)


def test_what_was_seen_before_training_moved_again_is_no_history() -> None:
    job = Job(2)
    job.look(20)
    job.silent = {1}
    job.clock.seconds += 600
    job.peers[0].forget()
    forgotten = dict(job.peers[0].beats)
    job.look(1)

    assert forgotten == {}
    assert job.age(1) is None


def test_signs_of_life_are_read_every_five_seconds_at_most_and_not_by_all_at_once() -> None:
    job = Job(8)
    readings: dict[int, list[float]] = {rank: [] for rank in job.ranks}
    for _ in range(60):
        for rank in job.ranks:
            before = job.store.texts
            job.look(LOOK_SECONDS, rank)
            if job.store.texts > before:
                readings[rank].append(job.clock.seconds)
            job.clock.seconds -= LOOK_SECONDS
        job.clock.seconds += LOOK_SECONDS

    gaps = [b - a for each in readings.values() for a, b in pairwise(each)]
    assert min(gaps) >= SECONDS_BETWEEN_READINGS
    assert max(gaps) <= 1.5 * SECONDS_BETWEEN_READINGS + LOOK_SECONDS
    assert len({tuple(each) for each in readings.values()}) > 4


def test_of_many_ranks_each_reads_the_texts_of_blocks_and_the_firsts_those_of_their_block() -> None:
    job = Job(2 * BLOCK_SIZE + 2)
    job.look(12)
    job.store.texts = job.store.checks = 0

    job.look(3 * SECONDS_BETWEEN_READINGS)

    readings = 3 * len(job.ranks)
    assert job.store.texts <= 3 * readings + 3 * 3 * BLOCK_SIZE
    assert job.store.checks <= 15 * len(job.ranks) + 2 * readings
    assert [peers.beats.keys() for peers in job.peers] == [set(job.ranks)] * len(job.ranks)
    assert {job.age(rank, seen_by=100) for rank in job.ranks} == {0}


def test_no_key_of_a_rank_that_is_there_is_asked_for_one_by_one() -> None:
    job = Job(BLOCK_SIZE)
    job.silent = {5}
    for peers in job.peers[:5] + job.peers[6:]:
        peers.beat({}, None)

    job.store.checks = 0
    job.peers[0].look(job.ranks, is_stuck=True)

    assert job.peers[0].beats.keys() == set(job.ranks) - {5}
    assert job.store.checks < 20


def test_a_silent_first_of_a_block_hides_none_of_its_block() -> None:
    job = Job(2 * BLOCK_SIZE)
    job.look(20)
    job.silent = {BLOCK_SIZE}

    job.look(2 * READINGS_TO_BELIEVE * SECONDS_BETWEEN_READINGS)

    alone = job.age(BLOCK_SIZE, seen_by=3)
    assert alone is not None and alone > SECONDS_BETWEEN_READINGS
    assert {job.age(rank, seen_by=3) for rank in job.ranks if rank != BLOCK_SIZE} == {0}


def test_a_rank_that_hangs_is_heard_of_while_it_says_so() -> None:
    job = Job(2)
    heard = []
    for tells in (False, True, True, False):
        if tells:
            job.peers[0].tell_of_hang()
        job.look(1, 1)
        heard.append(job.peers[1].others_hang)
    job.look(NOTICE_SECONDS + 1, 1)

    assert heard == [False, False, True, True]
    assert not job.peers[1].others_hang


def test_a_notice_left_long_ago_is_not_believed() -> None:
    job = Job(2)
    job.peers[0].tell_of_hang()

    job.look(10, 1)

    assert not job.peers[1].others_hang
