"""Tests of `StoreChannel` with two hundred simulated ranks in blocks of 64 over one store."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from fakes.clock import FakeClock
from fakes.store_clients import connected
from torch.distributed import HashStore

from zerowatch.metrics.catalog import communication
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.collectives.groups import RankSet
from zerowatch.runtime.cross_rank.exchange.coordinator import (
    BLOCK_SIZE,
    MAX_MISSED_STEP_TIMES,
    Coordinator,
    rank_blocks,
)
from zerowatch.runtime.cross_rank.exchange.heartbeats import MAX_SINGLE_READS
from zerowatch.runtime.cross_rank.exchange.rank_messages import (
    UNKNOWN,
    CallReport,
    CompareResult,
    RankReport,
    SequenceHash,
    StepTimes,
)
from zerowatch.runtime.cross_rank.exchange.store_channel import StoreChannel

NUM_RANKS, CALLS = 200, 30
PATIENCE = 20.0
NAMES = {number: f"call {number}" for number in range(CALLS + 1)}


class Ranks:
    """Many ranks in one process, each with its own side of the store."""

    def __init__(self, seed: int, num_ranks: int = NUM_RANKS) -> None:
        self.clock = FakeClock()
        self.store = HashStore()
        self.rank_set = RankSet(tuple(range(num_ranks)))
        self.rank_set.roles = ["dp"]
        self.recorders = [Recorder() for _ in range(num_ranks)]
        self.channels = [self.open(rank) for rank in range(num_ranks)]
        self.durations = np.random.default_rng(seed).random((num_ranks, CALLS)).astype(np.float32)

    def open(self, rank: int) -> StoreChannel:
        return StoreChannel(
            connected(self.store, self.clock),
            rank=rank,
            world_size=self.rank_set.size,
            host="host",
            patience_seconds=PATIENCE,
            stuck_seconds=15.0,
            recorder=self.recorders[rank],
        )

    @property
    def failures(self) -> list[int]:
        """The ranks that have counted a failure of a peer, as often as they have."""
        values = [
            recorder.snapshot().value(communication.EXCHANGE_FAILURES, "peer") or 0.0
            for recorder in self.recorders
        ]
        return [rank for rank, value in enumerate(values) for _ in range(round(value))]

    def report(self, rank: int, *, skipping: int | None = None, forward: float = 0.1) -> None:
        signatures = [number for number in range(1, CALLS + 1) if number != skipping]
        calls = CallReport(
            first_timed=1,
            durations=self.durations[rank],
            first_issued=1,
            signatures=np.array(signatures, np.uint32),
            prefix_hash=SequenceHash(since=1, crc=0),
        )
        step_times = StepTimes(
            num_steps=9,
            step_seconds=0.5,
            busy_seconds=(0.0, forward, 0.2, 0.1),
            deviation_seconds=(0.0,) * 4,
        )
        report = RankReport(
            calls={self.rank_set.key: calls}, names=NAMES, step_times={rank: step_times}
        )
        self.channels[rank].post_report(report)

    def read(self, *silent: int) -> dict[int, list[CompareResult]]:
        """Let all ranks but some poll, often enough for results to reach every rank."""
        received: dict[int, list[CompareResult]] = {rank: [] for rank in range(len(self.channels))}
        for _ in range(3):
            for rank, channel in enumerate(self.channels):
                if rank not in silent:
                    results = channel.poll([self.rank_set], self.rank_set)
                    received[rank] += [result for _, result in results]
        return received


def durations_in(results: list[CompareResult]) -> list[float]:
    return [seconds for result in results for seconds in result.min_durations.tolist()]


def test_only_many_members_are_merged_in_blocks() -> None:
    assert list(rank_blocks(range(200))) == [0, 64, 128, 192]
    assert [len(block) for block in rank_blocks(range(200)).values()] == [64, 64, 64, 8]
    assert list(rank_blocks((3, 5))) == [3, 5]
    assert len(rank_blocks(range(BLOCK_SIZE))) == BLOCK_SIZE


def test_all_of_two_hundred_ranks_get_the_least_durations(seed: int) -> None:
    ranks = Ranks(seed)
    for rank in range(NUM_RANKS):
        ranks.report(rank)

    received = ranks.read()

    expected = ranks.durations.min(axis=0).tolist()
    assert all(durations_in(results) == expected for results in received.values())
    assert ranks.failures == []


def test_one_diverged_rank_among_two_hundred_is_named_to_all(seed: int) -> None:
    ranks = Ranks(seed)
    for rank in range(NUM_RANKS):
        ranks.report(rank, skipping=1 if rank == 77 else None)

    received = ranks.read()

    named = {
        rank: [result.divergence.diverged for result in results if result.divergence]
        for rank, results in received.items()
    }
    assert named == {rank: [(77,)] for rank in range(NUM_RANKS)}


def test_one_slow_rank_among_two_hundred_is_named_at_the_second_exchange(seed: int) -> None:
    ranks = Ranks(seed)
    named = []
    for _ in range(2):
        for rank in range(NUM_RANKS):
            ranks.report(rank, forward=0.15 if rank == 130 else 0.1)
        received = ranks.read()
        named.append({one.rank for result in received[5] for one in result.stragglers})

    assert named == [set(), {130}]


def test_a_silent_rank_is_excluded_and_counted_once(
    caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    ranks = Ranks(seed)
    waiting, without = [], []
    for received in (waiting, waiting, waiting, without, without):
        for rank in range(NUM_RANKS):
            if rank != 70:
                ranks.report(rank)
        with caplog.at_level(logging.WARNING):
            received += ranks.read(70)[199]
        ranks.clock.seconds += PATIENCE * 0.4

    assert durations_in(waiting) == []
    assert durations_in(without) == [UNKNOWN] * CALLS  # rank 70 may have waited least
    assert ranks.failures == [64]
    assert [record.args[0] for record in caplog.records if record.args] == ["rank 70"]


def test_in_a_large_job_ranks_that_have_ended_are_no_failure(
    caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    ranks = Ranks(seed)
    ranks.read()
    for rank in range(1, NUM_RANKS):
        ranks.channels[rank].post_last_report()
    for _ in range(3):
        ranks.clock.seconds += PATIENCE
        ranks.channels[0].post_report(RankReport(calls={}))
        ranks.read(*range(1, NUM_RANKS))

    assert caplog.messages == []
    assert ranks.failures == []
    assert ranks.channels[0].longest_silence_seconds() == 0


def test_a_rank_that_was_silent_takes_part_again(seed: int) -> None:
    ranks = Ranks(seed, 3)
    for rank in (0, 1):
        ranks.report(rank)
    ranks.read(2)
    for _ in range(3):
        ranks.clock.seconds += PATIENCE * 0.4
        ranks.read(2)
    ranks.report(2)
    ranks.read()

    again = CallReport(
        first_timed=CALLS + 1,
        durations=np.array([0.5], np.float32),
        first_issued=CALLS + 1,
        signatures=np.array([1], np.uint32),
        prefix_hash=None,
    )
    for rank, channel in enumerate(ranks.channels):
        calls = (
            again
            if rank
            else CallReport(
                first_timed=again.first_timed,
                durations=np.array([0.75], np.float32),
                first_issued=again.first_issued,
                signatures=again.signatures,
                prefix_hash=None,
            )
        )
        channel.post_report(RankReport(calls={ranks.rank_set.key: calls}))
    received = ranks.read()

    assert durations_in(received[2]) == [0.5]


def test_no_rank_counts_as_silent_while_there_is_nothing_to_report(seed: int) -> None:
    ranks = Ranks(seed)
    for _ in range(20):
        ranks.clock.seconds += PATIENCE / 4
        for channel in ranks.channels:
            channel.post_report(RankReport(calls={}))
        ranks.read()

    assert ranks.failures == []
    assert max(channel.longest_silence_seconds() for channel in ranks.channels) < PATIENCE


def test_the_first_rank_of_a_block_may_be_missing_with_all_its_block(seed: int) -> None:
    ranks = Ranks(seed)
    silent = range(64, 128)
    for _ in range(8):
        for rank in range(NUM_RANKS):
            if rank not in silent:
                ranks.report(rank)
        received = ranks.read(*silent)
        ranks.clock.seconds += PATIENCE / 4

    assert ranks.failures == [0]
    assert any(result.reference for result in received[199])


def test_entries_that_cannot_be_decoded_are_counted_and_skipped(seed: int) -> None:
    ranks = Ranks(seed, 2)
    ranks.store.set("report/1/0", b"rubbish")
    ranks.channels[1]._reports._next = 1
    ranks.store.set(f"result/{ranks.rank_set.key}/0", b"rubbish")
    ranks.channels[0].poll([ranks.rank_set], None)
    ranks.channels[0]._coordinators._rank_sets[0].writer._next = 1
    for rank in (0, 1):
        ranks.report(rank)

    received = ranks.read()

    assert ranks.failures == [0, 1]
    assert durations_in(received[0]) == ranks.durations.min(axis=0).tolist()


def test_durations_of_one_rank_alone_are_no_comparison(seed: int) -> None:
    ranks = Ranks(seed, 2)
    ranks.read(1)
    for _ in range(3):
        ranks.clock.seconds += PATIENCE * 0.4
        ranks.read(1)
    ranks.report(0)

    received = ranks.read(1)

    assert durations_in(received[0]) == [UNKNOWN] * CALLS


def step_times(forward: float = 0.1) -> StepTimes:
    return StepTimes(
        num_steps=9,
        step_seconds=0.5,
        busy_seconds=(0.0, forward, 0.2, 0.1),
        deviation_seconds=(0.0,) * 4,
    )


def test_step_times_are_compared_once_all_have_come() -> None:
    rank_set = RankSet((0, 1, 2))
    coordinator = Coordinator(rank_set, rank_blocks(rank_set.members))
    results = []
    for rank in rank_set.members:
        calls = CallReport(
            first_timed=1,
            durations=np.empty(0, np.float32),
            first_issued=1,
            signatures=np.empty(0, np.uint32),
            prefix_hash=None,
        )
        coordinator.add(
            rank, RankReport(calls={rank_set.key: calls}, step_times={rank: step_times()})
        )
        results.append(coordinator.drain_result(compare_step_times=True))

    assert results[:2] == [None, None]
    assert results[2] is not None and results[2].reference is not None


def test_a_rank_that_makes_no_steps_does_not_stop_the_others_from_being_compared() -> None:
    rank_set = RankSet((0, 1, 2))
    coordinator = Coordinator(rank_set, rank_blocks(rank_set.members))
    compared = []
    for _ in range(MAX_MISSED_STEP_TIMES + 3):
        for rank in rank_set.members:
            by_rank = {} if rank == 2 else {rank: step_times()}
            calls = CallReport(
                first_timed=1,
                durations=np.empty(0, np.float32),
                first_issued=1,
                signatures=np.empty(0, np.uint32),
                prefix_hash=None,
            )
            coordinator.add(rank, RankReport(calls={rank_set.key: calls}, step_times=by_rank))
        compared.append(coordinator.drain_result(compare_step_times=True) is not None)

    assert compared == [False] * MAX_MISSED_STEP_TIMES + [True] * 3


def report_of(
    key: str, rank: int, times: StepTimes | None = None, durations: tuple[float, ...] = ()
) -> RankReport:
    calls = CallReport(
        first_timed=1,
        durations=np.array(durations, np.float32),
        first_issued=1,
        signatures=np.empty(0, np.uint32),
        prefix_hash=None,
    )
    return RankReport(calls={key: calls}, step_times={} if times is None else {rank: times})


def test_a_report_without_the_rank_set_changes_nothing() -> None:
    rank_set = RankSet((0, 1))
    coordinator = Coordinator(rank_set, rank_blocks(rank_set.members))

    for rank in rank_set.members:
        coordinator.add(rank, report_of("another", rank, step_times()))

    assert coordinator.drain_result(compare_step_times=True) is None
    assert coordinator.drain_report() is None


def test_the_step_times_of_a_rank_that_was_excluded_are_not_compared() -> None:
    rank_set = RankSet((0, 1, 2))
    coordinator = Coordinator(rank_set, rank_blocks(rank_set.members))
    for rank, forward in ((0, 0.1), (1, 0.2), (2, 0.9)):
        coordinator.add(rank, report_of(rank_set.key, rank, step_times(forward)))

    coordinator.exclude(2)
    result = coordinator.drain_result(compare_step_times=True)

    assert result is not None and result.reference is not None
    assert result.reference.busy_seconds[1] == 0.1  # the faster of two
    assert coordinator.drain_result(compare_step_times=True) is None


def test_step_times_are_kept_where_they_are_not_compared() -> None:
    rank_set = RankSet((0, 1))
    coordinator = Coordinator(rank_set, rank_blocks(rank_set.members))
    for rank in rank_set.members:
        coordinator.add(rank, report_of(rank_set.key, rank, step_times(), (0.5, 0.25 + rank)))

    result = coordinator.drain_result(compare_step_times=False)

    assert result is not None
    assert (result.first_call, result.min_durations.tolist()) == (1, [0.5, 0.25])
    assert (result.reference, result.stragglers, result.divergence) == (None, (), None)
    later = coordinator.drain_result(compare_step_times=True)
    assert later is not None and later.reference is not None


def test_a_block_forwards_step_times_once_all_its_ranks_have_sent_some() -> None:
    rank_set = RankSet((0, 1, 2, 3))
    coordinator = Coordinator(rank_set, {rank: (rank,) for rank in (0, 1)})  # a block of two
    coordinator.add(0, report_of(rank_set.key, 0, step_times(0.3)))
    early = coordinator.drain_report()
    coordinator.add(1, report_of(rank_set.key, 1, step_times(0.2)))

    report = coordinator.drain_report()

    assert early is None
    assert report is not None
    assert report.step_times == {0: step_times(0.3), 1: step_times(0.2)}
    assert (list(report.calls), report.divergences) == ([rank_set.key], {})
    assert coordinator.drain_report() is None


def test_the_longest_silence_is_that_of_the_rank_that_reported_least_recently(seed: int) -> None:
    ranks = Ranks(seed, 3)
    for rank in (0, 1, 2):
        ranks.report(rank)
        ranks.clock.seconds += 3
        ranks.read()
    ranks.clock.seconds += 2
    for rank in (0, 1):
        ranks.report(rank)
    ranks.read()

    ranks.clock.seconds += 5

    assert ranks.channels[0].longest_silence_seconds() == 7
    assert ranks.channels[1].longest_silence_seconds() <= 7


@pytest.mark.parametrize(("exchanges", "is_sent"), [(1.2, False), (1.25, True)])
def test_an_empty_result_is_sent_when_there_was_none_for_more_than_an_exchange(
    seed: int, exchanges: float, is_sent: bool
) -> None:
    ranks = Ranks(seed, 2)
    ranks.channels[0].poll([ranks.rank_set], None)
    key = f"result/{ranks.rank_set.key}/0"

    ranks.clock.seconds += exchanges * PATIENCE / 4  # the patience is four exchanges
    ranks.channels[0].poll([ranks.rank_set], None)

    assert ranks.store.check([key]) is is_sent


def test_of_too_many_heartbeats_those_of_small_rank_sets_are_read(seed: int) -> None:
    ranks = Ranks(seed, num_ranks=1100)
    for channel in ranks.channels:
        channel.post_heartbeat({}, None)
    small, reader = RankSet((1090, 1095)), ranks.channels[1095]

    for _ in range(3):  # no first rank of a block gathers heartbeats
        reader.poll_heartbeats([ranks.rank_set, small], is_stuck=True)
        ranks.clock.seconds += 20

    assert len(reader.peers) == MAX_SINGLE_READS
    assert reader.peers.keys() >= set(small.members)
