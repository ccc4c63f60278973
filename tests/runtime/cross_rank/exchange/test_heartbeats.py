"""Tests of heartbeats: their ages, and how few requests to the store they take."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from fakes.clock import FakeClock
from fakes.store_clients import connected
from torch.distributed import HashStore

from zerowatch.runtime.cross_rank.exchange.coordinator import BLOCK_SIZE
from zerowatch.runtime.cross_rank.exchange.heartbeats import (
    ANNOUNCEMENT_SECONDS,
    MAX_DIGEST_AGE_READS,
    MAX_SINGLE_READS,
    READ_INTERVAL_SECONDS,
    HeartbeatTable,
)

STUCK_SECONDS = 30.0
POLL_SECONDS = 1.0


class CountingStore(HashStore):
    """Counts the checks, and the heartbeats and digests that were read."""

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
    """Some ranks, of which some send heartbeats and some poll."""

    def __init__(self, num_ranks: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = FakeClock()
        self.store = CountingStore()
        self.ranks = range(num_ranks)
        self.tables = [self.new_table(rank) for rank in self.ranks]
        self.silent: set[int] = set()
        self.issued, self.pause = 7, "eval"

    def new_table(self, rank: int) -> HeartbeatTable:
        store = connected(self.store, self.clock)
        return HeartbeatTable(store, rank, f"host-{rank}", STUCK_SECONDS, self.random)

    def run(self, seconds: float, *polling: int) -> None:
        for _ in range(round(seconds / POLL_SECONDS)):
            self.post()
            for rank in polling or self.ranks:
                if rank not in self.silent:
                    self.tables[rank].poll(self.ranks, is_stuck=True)
            self.clock.seconds += POLL_SECONDS

    def train(self, seconds: float) -> None:
        for _ in range(round(seconds / POLL_SECONDS)):
            self.post()
            for table in self.tables:
                table.clear()
            self.clock.seconds += POLL_SECONDS

    def post(self) -> None:
        for rank, table in enumerate(self.tables):
            if rank not in self.silent:
                table.post({"g": self.issued + rank}, self.pause if rank == 1 else None)

    def behind(self, seen_by: int) -> list[int]:
        """Return the ranks whose last call is older than that of the others."""
        heartbeats = self.tables[seen_by].heartbeats
        return [rank for rank, beat in heartbeats.items() if beat.issued["g"] < self.issued + rank]

    def age(self, of: int, *, seen_by: int = 0) -> float | None:
        return self.tables[seen_by].heartbeats[of].age_seconds


def test_heartbeats_are_read_of_ranks_that_have_sent_one(seed: int) -> None:
    job = Job(3, seed)
    job.silent = {2}

    job.run(2)

    assert {rank: (b.host, b.issued, b.pause) for rank, b in job.tables[0].heartbeats.items()} == {
        0: ("host-0", {"g": 7}, None),
        1: ("host-1", {"g": 8}, "eval"),
    }


def test_an_age_is_known_at_the_second_read_for_any_host_clocks(seed: int) -> None:
    job = Job(3, seed)
    job.run(1)
    at_first = job.age(1)
    job.silent = {2}
    job.run(30)

    assert at_first is None
    assert job.age(1) == 0
    assert job.age(2) == pytest.approx(30, abs=1.6 * READ_INTERVAL_SECONDS)


def test_ages_from_before_the_last_progress_are_discarded(seed: int) -> None:
    job = Job(2, seed)
    job.run(20)
    job.silent = {1}
    job.clock.seconds += 600
    job.tables[0].clear()
    forgotten = dict(job.tables[0].heartbeats)
    job.run(1)

    assert forgotten == {}
    assert job.age(1) is None


def test_heartbeats_are_read_every_five_seconds_at_most_and_not_by_all_at_once(seed: int) -> None:
    job = Job(8, seed)
    readings: dict[int, list[float]] = {rank: [] for rank in job.ranks}
    for _ in range(60):
        for rank in job.ranks:
            before = job.store.texts
            job.run(POLL_SECONDS, rank)
            if job.store.texts > before:
                readings[rank].append(job.clock.seconds)
            job.clock.seconds -= POLL_SECONDS
        job.clock.seconds += POLL_SECONDS

    gaps = [b - a for each in readings.values() for a, b in pairwise(each)]
    assert min(gaps) >= READ_INTERVAL_SECONDS
    assert max(gaps) <= 1.5 * READ_INTERVAL_SECONDS + POLL_SECONDS
    assert len({tuple(each) for each in readings.values()}) > 4


def test_of_many_ranks_each_reads_digests_and_the_first_of_a_block_its_heartbeats(
    seed: int,
) -> None:
    job = Job(2 * BLOCK_SIZE + 2, seed)
    job.run(12)
    job.store.texts = job.store.checks = 0

    job.run(3 * READ_INTERVAL_SECONDS)

    readings = 3 * len(job.ranks)
    assert job.store.texts <= 3 * readings + 3 * 3 * BLOCK_SIZE
    assert job.store.checks <= 15 * len(job.ranks) + 2 * readings
    assert [table.heartbeats.keys() for table in job.tables] == [set(job.ranks)] * len(job.ranks)
    assert {job.age(rank, seen_by=100) for rank in job.ranks} == {0}


def test_present_keys_are_not_checked_one_by_one(seed: int) -> None:
    job = Job(BLOCK_SIZE, seed)
    job.silent = {5}
    for table in job.tables[:5] + job.tables[6:]:
        table.post({}, None)

    job.store.checks = 0
    job.tables[0].poll(job.ranks, is_stuck=True)

    assert job.tables[0].heartbeats.keys() == set(job.ranks) - {5}
    assert job.store.checks < 20


def test_a_silent_first_of_a_block_hides_none_of_its_block(seed: int) -> None:
    job = Job(2 * BLOCK_SIZE, seed)
    job.run(20)
    job.silent = {BLOCK_SIZE}

    job.run(2 * MAX_DIGEST_AGE_READS * READ_INTERVAL_SECONDS)

    alone = job.age(BLOCK_SIZE, seen_by=3)
    assert alone is not None and alone > READ_INTERVAL_SECONDS
    assert {job.age(rank, seen_by=3) for rank in job.ranks if rank != BLOCK_SIZE} == {0}


def test_a_hang_is_known_while_it_is_announced(seed: int) -> None:
    job = Job(2, seed)
    announced = []
    for hangs in (False, True, True, False):
        if hangs:
            job.tables[0].announce_hang()
        job.run(1, 1)
        announced.append(job.tables[1].others_hang)
    job.run(ANNOUNCEMENT_SECONDS + 1, 1)

    assert announced == [False, False, True, True]
    assert not job.tables[1].others_hang


def test_an_old_announcement_is_ignored(seed: int) -> None:
    job = Job(2, seed)
    job.tables[0].announce_hang()

    job.run(10, 1)

    assert not job.tables[1].others_hang


@pytest.mark.parametrize(("seconds", "hangs"), [(14.5, True), (15.0, False)])
def test_an_announcement_ends_after_fifteen_seconds(seed: int, seconds: float, hangs: bool) -> None:
    job = Job(2, seed)
    for _ in range(2):  # the first one may be old
        job.tables[0].announce_hang()
        job.tables[1].poll(job.ranks, is_stuck=True)

    job.clock.seconds += seconds
    job.tables[1].poll(job.ranks, is_stuck=True)

    assert job.tables[1].others_hang is hangs


def test_a_rank_does_not_hear_its_own_announcement(seed: int) -> None:
    job = Job(2, seed)
    for _ in range(3):
        job.tables[0].announce_hang()
        job.run(1, 0)

    assert not job.tables[0].others_hang


def test_a_rank_that_makes_progress_reads_heartbeats_only_while_another_hangs(seed: int) -> None:
    job = Job(2, seed)
    for table in job.tables:
        table.post({}, None)
    known = []
    for hangs in (False, True, True):
        if hangs:
            job.tables[0].announce_hang()
        job.tables[1].poll(job.ranks, is_stuck=False)
        known.append(sorted(job.tables[1].heartbeats))

    assert known == [[], [], [0, 1]]


def test_no_read_draws_from_the_generator_of_the_script() -> None:
    store = connected(HashStore(), FakeClock())
    before = random.getstate()

    for rank in (0, 1):
        HeartbeatTable(store, rank, "host", STUCK_SECONDS).poll((0, 1), is_stuck=True)

    assert random.getstate() == before


@pytest.mark.parametrize("stalled_before", [False, True])
def test_a_silent_first_of_a_block_looks_like_no_rank_of_an_earlier_stall(
    seed: int, stalled_before: bool
) -> None:
    job = Job(2 * BLOCK_SIZE, seed)
    if stalled_before:
        job.run(40)
    job.issued += 1000
    job.train(3)
    job.clock.seconds += 3600
    job.train(3)

    job.silent = {BLOCK_SIZE}
    job.issued += 1
    job.run(3 * READ_INTERVAL_SECONDS)

    assert job.tables[3].heartbeats.keys() == set(job.ranks)
    assert job.behind(seen_by=3) == [BLOCK_SIZE]


def test_an_old_digest_is_deleted_once_the_store_responds(seed: int) -> None:
    job = Job(2 * BLOCK_SIZE, seed)
    job.run(12)
    failing = job.tables[BLOCK_SIZE]._store
    failing.close()
    with pytest.raises(RuntimeError, match="no connection"):
        job.tables[BLOCK_SIZE].clear()
    was_there = job.store.check(["beats/1"])
    failing.open()
    job.tables[BLOCK_SIZE].clear()

    assert was_there
    assert not job.store.check(["beats/1"])


def test_ranks_beyond_the_thousandth_are_known_to_all(seed: int) -> None:
    job = Job(1100, seed)
    job.post()
    job.issued += 1
    job.silent = {1090}

    job.run(20, *range(0, 1100, BLOCK_SIZE), 3, 1095)

    for reader in (3, 1095):
        assert job.tables[reader].heartbeats.keys() == set(job.ranks)
        assert job.behind(seen_by=reader) == [1090]


def test_without_digests_the_first_of_the_given_ranks_are_read(seed: int) -> None:
    job = Job(1100, seed)
    job.post()
    others = [rank for rank in job.ranks if rank < 1088]

    for _ in range(3):  # no first of a block reads
        job.tables[1095].poll([*range(1088, 1096), *others], is_stuck=True)
        job.clock.seconds += 2 * READ_INTERVAL_SECONDS

    known = job.tables[1095].heartbeats
    assert len(known) == MAX_SINGLE_READS
    assert known.keys() >= set(range(1088, 1096))
