"""Tests of `ComparisonThread`: several ranks over one store, with failures between them."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes.clock import FakeClock
from fakes.comparison_threads import INTERVAL_SECONDS, STUCK_SECONDS, ComparedRank, ComparedRanks
from fakes.rank_sets import FakeGroup
from fakes.scraper import eventually
from fakes.steps import step
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from zerowatch.metrics.catalog import communication
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.collectives.groups import RankSet
from zerowatch.runtime.common.rank_store import StoreClientFactory
from zerowatch.runtime.cross_rank import comparison_thread
from zerowatch.runtime.cross_rank.accounting import call_sequence
from zerowatch.runtime.cross_rank.accounting.call_sequence import SEARCH_SECONDS
from zerowatch.runtime.cross_rank.comparison_thread import (
    IDLE_SECONDS_BEFORE_HEARTBEATS,
    MAX_READ_AGE_SECONDS,
    MAX_STORE_SECONDS,
    MAX_UNANSWERED_STEP_TIMES,
    SECONDS_BETWEEN_LINES,
    CompareReporter,
    poll_interval_seconds,
)
from zerowatch.runtime.cross_rank.divergence import Divergence
from zerowatch.runtime.cross_rank.exchange.rank_messages import (
    NO_DURATIONS,
    CompareResult,
    Heartbeat,
)
from zerowatch.runtime.cross_rank.exchange.store_channel import PATIENCE_EXCHANGES
from zerowatch.runtime.cross_rank.exchange.store_log import MAX_ENTRIES, StoreConnection
from zerowatch.runtime.cross_rank.hang.hang_report import SILENT_SECONDS
from zerowatch.runtime.cross_rank.stragglers import StepTimeReference, StepTimes, Straggler

EXPOSED, WAIT = communication.COMM_EXPOSED_SECONDS, communication.COMM_WAIT_SECONDS


def test_the_rank_that_came_last_waited_least() -> None:
    ranks = ComparedRanks(3)
    for rank, milliseconds in zip(ranks.all, (10, 8, 3), strict=True):
        rank.run(milliseconds)

    ranks.exchange(times=2)

    waits = [rank.milliseconds(WAIT, "dp") for rank in ranks.all]
    assert waits == pytest.approx([7, 5, 0], abs=1e-5)
    assert [rank.fail_open.failures for rank in ranks.all] == [{}] * 3
    assert [rank.failures("unmatched") for rank in ranks.all] == [0, 0, 0]


def test_a_slow_rank_is_logged_by_the_first_rank_and_scored_on_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = ComparedRanks(4)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            for rank in ranks.all:
                rank.steps(forward=40.0 if rank.rank == 2 else 10.0)
            ranks.exchange()

    scores = [
        rank.recorder.snapshot().value(communication.STRAGGLER_SCORE, "forward")
        for rank in ranks.all
    ]
    assert scores == pytest.approx([0, 0, 0.03 / 0.05, 0], abs=1e-9)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "rank 2 is slow in forward"
    ]


def test_a_rank_that_is_no_longer_slow_is_logged_but_not_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = ComparedRanks(2)
    num_lines = []
    with caplog.at_level(logging.WARNING):
        for slower in (40.0, 40.0, 10.0, 10.0, 40.0, 40.0, 10.0, 10.0, 10.0):
            if len(num_lines) == 8:
                ranks.exchange(times=round(SECONDS_BETWEEN_LINES / INTERVAL_SECONDS))
            ranks[0].steps()
            ranks[1].steps(forward=slower)
            ranks.exchange()
            num_lines.append(len(caplog.records))

    assert num_lines == [0, 1, 1, 1, 1, 1, 1, 1, 2]
    assert caplog.records[-1].message == "rank 1 is no longer slow in forward"


def test_a_rank_that_skips_a_collective_is_named_and_counted_on_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = ComparedRanks(2)
    step = ("all_reduce", "all_gather", "barrier")
    for number in range(5):
        for rank in ranks.all:
            for op in step:
                if not (number == 4 and op == "all_gather" and rank.rank == 1):
                    rank.run(op=op)
    ranks.exchange(times=2)

    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert errors[0].startswith(
        "rank 1 diverged from the common sequence of collectives at call 14"
    )
    assert [
        rank.recorder.snapshot().value(communication.COLLECTIVE_MISMATCHES) for rank in ranks.all
    ] == [1, 1]


def test_a_rank_stuck_in_a_collective_still_reports_what_it_issued() -> None:
    ranks = ComparedRanks(2)
    ranks[0].groups[0].issue("all_reduce")
    ranks[1].groups[0].issue("barrier")

    ranks.exchange(times=2)

    assert ranks[0].recorder.snapshot().value(communication.COLLECTIVE_MISMATCHES) == 1


@pytest.mark.parametrize("affected", [(0, 1), (1,)], ids=["on all ranks", "on one"])
def test_calls_that_never_settle_are_left_out_after_two_searches_and_counted(
    affected: tuple[int, ...],
) -> None:
    ranks = ComparedRanks(2)
    for rank in ranks.all:
        for _ in range(3):
            if rank.rank in affected:
                rank.groups[0].issue()
            else:
                rank.run(1)
    waits, per_search = [], round(SEARCH_SECONDS / INTERVAL_SECONDS)
    for _ in range(4 * per_search):
        for rank, milliseconds in zip(ranks.all, (10, 4), strict=True):
            rank.run(milliseconds)
        ranks.exchange()
        waits.append(ranks[0].milliseconds(WAIT, "dp"))
    failures = [rank.failures("unmatched") for rank in ranks.all]
    ranks.exchange(times=2)

    assert waits[per_search] == 0
    assert waits[-1] - waits[-1 - per_search] == pytest.approx(6 * per_search, abs=1e-3)
    assert all(failures[rank] for rank in affected)
    assert max(failures) <= 10  # an alert fires above this
    assert ranks[0].recorder.snapshot().value(communication.COLLECTIVE_MISMATCHES) == 0
    assert ranks[0].milliseconds(EXPOSED, "dp") == pytest.approx(
        10 * 4 * per_search + (3 if 0 not in affected else 0)
    )


def test_a_call_that_never_settles_is_no_failure_where_nothing_is_compared() -> None:
    alone = ComparedRank(0, clock := FakeClock(), None, FakeGroup((0, 1)))
    alone.groups[0].issue()
    for _ in range(3):
        alone.run(10)
        alone.connect().poll()
        clock.seconds += SEARCH_SECONDS

    assert alone.failures("unmatched") == 0
    assert alone.milliseconds(EXPOSED, "dp") > 0


def test_a_peer_that_never_reports_is_excluded_and_the_waits_are_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = ComparedRanks(3, monitored=2)
    for _ in range(PATIENCE_EXCHANGES + 3):
        for rank, milliseconds in zip(ranks.all, (10, 4), strict=True):
            rank.steps(forward=milliseconds)
            for size in (1_000, 1_000_000):  # the third rank may be the one that is late
                rank.run(milliseconds, size=size)
        ranks.exchange()

    exclusions = [record for record in caplog.records if "has not reported" in record.message]
    snapshot = ranks[0].recorder.snapshot()
    assert ranks[0].milliseconds(WAIT, "dp") == 0
    assert ranks[0].milliseconds(EXPOSED, "dp") >= 2 * 10 * (PATIENCE_EXCHANGES + 1)
    assert snapshot.value(communication.COMM_LINK_LATENCY, "dp") is None
    assert snapshot.value(communication.STRAGGLER_SCORE, "forward") == pytest.approx(0.006 / 0.047)
    assert [rank.failures("peer") for rank in ranks.all] == [1, 0]
    assert ranks[0].failures("unmatched") <= 1
    assert len(exclusions) == 1


def test_ranks_that_have_ended_in_good_order_are_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = ComparedRanks(3)
    for rank in ranks.all:
        rank.run(3)
    ranks.exchange(times=3)
    for rank in ranks.all[1:]:
        rank.thread._stopping = True
        rank.thread._close()
    ranks.exchange(1, 2, times=3 * PATIENCE_EXCHANGES)

    assert caplog.messages == []
    assert ranks[0].failures("peer") == 0
    age = ranks[0].recorder.snapshot().value(communication.PEER_HEARTBEAT_AGE)
    assert age is not None and age <= INTERVAL_SECONDS  # of its own reports


@pytest.mark.parametrize("more_exchanges", [0, 3 * PATIENCE_EXCHANGES])
def test_the_last_calls_of_a_rank_that_has_ended_are_compared_and_the_links_stay(
    more_exchanges: int,
) -> None:
    ranks = ComparedRanks(2)
    ranks[0].groups.append(alone := FakeGroup((0,), role="tp"))
    compare_a_slow_rank(ranks)
    ranks.exchange(times=2)
    before = ranks[0].milliseconds(WAIT, "dp")
    for rank, milliseconds in zip(ranks.all, (10, 4), strict=True):
        rank.run(milliseconds)
    ranks[1].thread._stopping = True
    ranks[1].thread._close()  # rank 0 has not reported its last call yet
    ranks.clock.seconds += 1
    for _ in range(more_exchanges):
        alone.run()
        ranks.exchange(1)
    ranks[0].thread._stopping = True
    ranks[0].thread._close()

    snapshot = ranks[0].recorder.snapshot()
    assert ranks[0].milliseconds(WAIT, "dp") - before == pytest.approx(6, abs=1e-3)
    assert snapshot.value(communication.COMM_LINK_LATENCY, "dp") is not None
    assert snapshot.value(communication.COMM_BUS_BANDWIDTH, "all_reduce", "dp") is not None
    assert ranks[0].failures("unmatched") == 0


def test_ranks_that_fall_silent_together_are_named_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = ComparedRanks(4, monitored=1)

    ranks.exchange(times=2 * PATIENCE_EXCHANGES)

    assert [line.partition(" for ")[0] for line in caplog.messages] == [
        "ranks 1, 2, 3 have not reported"
    ]
    assert ranks[0].failures("peer") == 3


def test_a_late_joiner_takes_part_from_then_on() -> None:
    ranks = ComparedRanks(3, monitored=2)
    for _ in range(PATIENCE_EXCHANGES + 2):
        for rank in ranks.all:
            rank.run(10)
        ranks.exchange()
    joiner = ranks.join(2)
    for _ in range(
        PATIENCE_EXCHANGES + 2
    ):  # its calls were recorded all the time, its thread was not started
        joiner.groups[0].issue()
    joiner = ComparedRank(2, ranks.clock, lambda: ranks.store, joiner.groups[0]).connect()
    ranks.all.append(joiner)
    ranks.exchange()
    before = ranks[0].milliseconds(WAIT, "dp")
    for rank in ranks.all:
        rank.run(4 if rank is joiner else 10)

    ranks.exchange(times=2)

    assert ranks[0].milliseconds(WAIT, "dp") - before == pytest.approx(6, abs=1e-4)
    assert joiner.milliseconds(WAIT, "dp") == 0
    assert joiner.milliseconds(EXPOSED, "dp") == pytest.approx(4)
    assert ranks[0].recorder.snapshot().value(communication.COLLECTIVE_MISMATCHES) == 0


@pytest.mark.parametrize("paused", [0, 2], ids=["the first", "another"])
def test_a_rank_whose_thread_was_paused_for_long_is_matched_again(paused: int) -> None:
    ranks = ComparedRanks(3)
    ranks.exchange()
    for number in range(2 * MAX_ENTRIES + 2 * PATIENCE_EXCHANGES):
        for rank, milliseconds in zip(ranks.all, (4, 10, 10), strict=True):
            rank.run(milliseconds)
        is_paused = number < 2 * MAX_ENTRIES
        ranks.exchange(*([paused] if is_paused else []))
        if is_paused:
            before = ranks[2].milliseconds(WAIT, "dp")
    ranks.exchange(times=2)

    assert before == 0
    assert ranks[2].milliseconds(WAIT, "dp") > 5 * 2 * PATIENCE_EXCHANGES
    assert ranks[0].failures("peer") == (paused == 2)
    assert ranks[2].milliseconds(EXPOSED, "dp") == pytest.approx(
        10 * (2 * MAX_ENTRIES + 2 * PATIENCE_EXCHANGES)
    )
    assert ranks[2].recorder.snapshot().value(communication.COLLECTIVE_MISMATCHES) == 0


def test_after_a_suspension_of_the_whole_job_no_rank_counts_as_silent() -> None:
    ranks = ComparedRanks(3)
    for _ in range(4):
        ranks.exchange(times=2)
        ranks.clock.seconds += 3600

    ranks.exchange()

    assert [rank.failures("peer") for rank in ranks.all] == [0, 0, 0]


def test_after_a_suspension_calls_still_wait_for_their_result() -> None:
    ranks = ComparedRanks(3)
    ranks.exchange(times=2)
    for rank, milliseconds in zip(ranks.all, (4, 10, 10), strict=True):
        rank.run(milliseconds)
        rank.poll()
        rank.thread._next_exchange = 0.0
        rank.poll()
    ranks.clock.seconds += 3600
    for number in (1, 2, 0):  # the rank that compares is the last to go on
        ranks[number].poll()

    ranks.exchange(times=2)

    assert [rank.failures("unmatched") for rank in ranks.all] == [0, 0, 0]
    waits = [rank.milliseconds(WAIT, "dp") for rank in ranks.all]
    assert waits == pytest.approx([0, 6, 6], abs=1e-4)


def test_a_rank_that_is_lost_in_a_suspension_counts_as_silent() -> None:
    ranks = ComparedRanks(3)
    ranks.exchange()
    ranks.clock.seconds += 3600

    ranks.exchange(2, times=PATIENCE_EXCHANGES + 1)

    assert [rank.failures("peer") for rank in ranks.all] == [1, 0, 0]


def test_a_rank_that_compares_nothing_counts_its_costs_and_no_failures() -> None:
    ranks = ComparedRanks(2)
    alone = ComparedRank(0, ranks.clock, None, FakeGroup((0, 1))).connect()
    ranks.all = [alone]
    for _ in range(3):
        alone.run(7)
        ranks.exchange()

    assert alone.milliseconds(EXPOSED, "dp") == pytest.approx(21)
    assert alone.failures("unmatched") == 0


def test_groups_first_used_long_after_the_start_are_compared() -> None:
    ranks = ComparedRanks(2)
    ranks.exchange(times=PATIENCE_EXCHANGES + 2)
    for rank, milliseconds in zip(ranks.all, (10, 4), strict=True):
        late = FakeGroup((0, 1), role="world")
        late.rank_set.key = "late"
        rank.groups.append(late)
        late.run(ms=milliseconds)
        ranks.exchange(1 - rank.rank)  # one after the other

    ranks.exchange(times=2)

    assert ranks[0].milliseconds(WAIT, "world") == pytest.approx(6, abs=1e-5)
    assert ranks[1].failures("unmatched") == 0


def test_two_groups_are_matched_each_by_its_own_numbers() -> None:
    ranks = ComparedRanks(2)
    for rank in ranks.all:
        other = FakeGroup((0, 1), role="tp")
        other.rank_set.key = "other"
        rank.groups.append(other)
        rank.run(10 if rank.rank == 0 else 8)
        other.run(ms=3 if rank.rank == 0 else 9)

    ranks.exchange(times=2)

    waits = [[rank.milliseconds(WAIT, role) for role in ("dp", "tp")] for rank in ranks.all]
    assert waits == [pytest.approx([2, 0], abs=1e-5), pytest.approx([0, 6], abs=1e-5)]


def test_an_idle_job_keeps_its_logs_alive() -> None:
    ranks = ComparedRanks(3)
    ages = []
    for _ in range(10 * PATIENCE_EXCHANGES):
        ranks.exchange()
        ages += [
            rank.recorder.snapshot().value(communication.PEER_HEARTBEAT_AGE) or 0.0
            for rank in ranks.all
        ]

    assert max(ages) <= 1.5 * INTERVAL_SECONDS
    assert [rank.failures("peer") for rank in ranks.all] == [0, 0, 0]


def test_a_rank_set_that_its_first_rank_never_used_makes_no_rank_silent() -> None:
    ranks = ComparedRanks(2)
    unused = FakeGroup((0, 1), role="tp")
    unused.rank_set.key = "unused"
    ranks[1].groups.append(unused)

    ranks.exchange(times=3 * PATIENCE_EXCHANGES)

    age = ranks[1].recorder.snapshot().value(communication.PEER_HEARTBEAT_AGE)
    assert age is not None and age <= 1.5 * INTERVAL_SECONDS


def test_heartbeats_are_read_only_while_there_is_no_progress() -> None:
    ranks = ComparedRanks(2)
    ranks.exchange()
    before = dict(ranks[0].thread.peers)
    ranks[1].run()
    ranks[1].groups[0].num_unseen = ranks[0].groups[0].num_unseen = 3
    ranks[1].thread.counts_unseen = True
    ranks[1].thread.on_step(step(7))
    ranks[0].phase_timer.seconds = STUCK_SECONDS + 1
    ranks[1].thread.announce_hang(True)
    ranks[1].thread.expected_pause = lambda: "eval"
    ranks.exchange(times=2)

    peers, others_hang = ranks[0].thread.peers, ranks[0].thread.others_hang
    ranks[0].phase_timer.seconds = 0.0
    ranks.exchange()
    assert before == {}
    assert others_hang
    assert (ranks[0].thread.peers, ranks[0].thread.others_hang) == ({}, False)
    assert {rank: beat.host for rank, beat in peers.items()} == {0: "host-0", 1: "host-1"}
    assert list(peers[1].issued.values()) == [1]
    assert [list(peers[rank].unseen.values()) for rank in (0, 1)] == [[], [3]]
    assert (peers[0].step, peers[1].step) == (0, 7)
    assert (peers[0].pause, peers[1].pause) == (None, "eval")


def test_a_rank_that_does_not_run_sends_nothing_until_it_runs_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparison_thread, "POLLS_PER_EXCHANGE", 500)  # one in 10 ms
    ranks, asked, is_silent = ComparedRanks(2), list[bool](), True

    def silent() -> bool:
        asked.append(is_silent)
        return is_silent

    ranks[1].thread.is_silent = silent
    ranks[1].thread.start()
    assert eventually(lambda: len(asked) > 3, 60)
    has_sent = ranks.store.check(["beat/1"])
    is_silent = False

    assert not has_sent
    assert eventually(lambda: ranks.store.check(["beat/1"]), 60)
    ranks[1].thread.stop()


def test_stopping_counts_the_last_calls_on_all_ranks() -> None:
    ranks = ComparedRanks(2, threads=True)
    for rank, milliseconds in zip(ranks.all, (10, 4), strict=True):
        rank.run(milliseconds)

    stopping = [threading.Thread(target=rank.thread.stop) for rank in ranks.all]
    for thread in stopping:
        thread.start()
    for thread in stopping:
        thread.join()

    assert ranks[0].milliseconds(WAIT, "dp") == pytest.approx(6, abs=1e-5)
    assert [rank.milliseconds(EXPOSED, "dp") for rank in ranks.all] == pytest.approx([10, 4])


def test_stopping_alone_waits_with_a_limit_and_still_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparison_thread, "CLOSING_SECONDS", 0.1)
    ranks = ComparedRanks(2, monitored=1, threads=True)
    ranks[0].run(10)
    began = time.monotonic()

    ranks[0].thread.stop()
    ranks[0].thread.stop()

    assert time.monotonic() - began >= 0.1
    assert ranks[0].milliseconds(EXPOSED, "dp") == pytest.approx(10)
    assert ranks[0].failures("unmatched") == 0


def test_other_ranks_are_unknown_while_the_store_does_not_answer() -> None:
    ranks = ComparedRanks(2)
    ranks[0].phase_timer.seconds = STUCK_SECONDS + 1
    ranks[1].thread.expected_pause = lambda: "eval"
    ranks[1].thread.announce_hang(True)
    ranks.exchange(times=2)
    before = ranks[0].thread.peers[1].pause, ranks[0].thread.others_hang

    ranks.clock.seconds += MAX_READ_AGE_SECONDS + 1  # a call of the store waits meanwhile

    assert before == ("eval", True)
    assert (ranks[0].thread.peers, ranks[0].thread.others_hang) == ({}, False)


def compare_a_slow_rank(ranks: ComparedRanks) -> None:
    for _ in range(4):
        for rank in ranks.all:
            rank.steps(forward=40.0 if rank.rank == 1 else 10.0)
            for size in (1_000, 1_000_000):
                rank.run(size / 1e5, size=size)
        ranks.exchange()


def comparison_figures(rank: ComparedRank) -> tuple[bool, ...]:
    snapshot = rank.recorder.snapshot()
    values = (
        snapshot.value(communication.STRAGGLER_SCORE, "forward"),
        snapshot.value(communication.PEER_HEARTBEAT_AGE),
        snapshot.value(communication.COMM_LINK_LATENCY, "dp"),
        snapshot.value(communication.COMM_BUS_BANDWIDTH, "all_reduce", "dp"),
    )
    return (*(value is not None for value in values), bool(rank.thread.stragglers))


class SlowStore:
    """A store that calls a function once before it answers."""

    def __init__(self, store: Any, meanwhile: Callable[[], object]) -> None:
        self._store, self._meanwhile = store, [meanwhile]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        while self._meanwhile:
            self._meanwhile.pop()()
        return self._store.check(keys)


def poll_slow_store(rank: ComparedRank, meanwhile: Callable[[], object]) -> None:
    """Poll once, and call a function while the thread waits for the store."""
    connection: Any = rank.thread._connection
    connection._client = SlowStore(store := connection._client, meanwhile)
    rank.poll()
    connection._client = store


def look_twice(rank: ComparedRank, clock: FakeClock) -> None:
    """Let the clock run on, and look twice whether the thread waits for the store."""
    clock.seconds += MAX_STORE_SECONDS + 1
    for _ in range(2):
        rank.thread.account_if_stuck()


def test_costs_are_added_up_while_the_thread_waits_for_the_store_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = ComparedRanks(3)
    compare_a_slow_rank(ranks)
    ranks.exchange(times=2)
    one, figures, exposed = ranks[2], [], []
    waits = [one.milliseconds(WAIT, "dp")]

    def look() -> None:
        for age_seconds in (MAX_STORE_SECONDS - 1, 2, 1, 1):
            ranks.clock.seconds += age_seconds
            one.run(7)
            before = one.milliseconds(EXPOSED, "dp")
            one.thread.account_if_stuck()
            exposed.append(one.milliseconds(EXPOSED, "dp") - before)
            figures.append(comparison_figures(one))
        waits.append(one.milliseconds(WAIT, "dp"))

    with caplog.at_level(logging.INFO):
        poll_slow_store(one, look)
        ranks.exchange(times=2)

    assert exposed == pytest.approx([0, 0, 21, 7])
    assert figures == [(True,) * 5, (True,) * 5, (False,) * 5, (False,) * 5]
    assert waits[0] == waits[1]
    assert one.failures("store") == 1
    assert "c10d store responds again: comparison with other ranks resumed" in caplog.messages


def test_a_process_that_was_stopped_has_not_lost_the_store() -> None:
    ranks = ComparedRanks(2)

    def go_on() -> None:
        ranks.clock.seconds += MAX_STORE_SECONDS + 1
        for rank, milliseconds in zip(ranks.all, (4, 10), strict=True):
            rank.run(milliseconds)
        ranks[1].thread.account_if_stuck()

    for _ in range(2):
        poll_slow_store(ranks[1], go_on)
        ranks.exchange(times=2)

    assert ranks[1].failures("store") == 0
    assert ranks[1].milliseconds(WAIT, "dp") == pytest.approx(12, abs=1e-3)


def test_nothing_is_added_up_where_the_thread_does_not_wait_for_the_store() -> None:
    ranks = ComparedRanks(3)
    alone = ComparedRank(0, ranks.clock, None, FakeGroup((0, 1))).connect()
    stopping, failed, idle = ranks.all
    failed.thread.expected_pause = lambda: str(1 / 0)
    failed.poll()
    stopping.thread._stopping = True
    for rank in (alone, failed, idle, stopping):
        rank.run(7)
    exposed: list[float] = []

    def look() -> None:
        for rank in (alone, failed, idle, stopping):
            look_twice(rank, ranks.clock)
            exposed.append(rank.milliseconds(EXPOSED, "dp"))

    poll_slow_store(stopping, look)

    assert failed.fail_open.failures == {"cross_rank": 1}
    assert exposed == [0, 0, 0, 0]
    assert failed.failures("store") == 0


def test_no_other_thread_waits_while_the_thread_pauses_in_its_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = ComparedRanks(2)
    waiting: list[bool] = []

    def pause() -> None:
        monkeypatch.undo()
        args = (ranks[0], ranks.clock)
        other = threading.Thread(target=look_twice, args=args, daemon=True)
        other.start()
        other.join(10)
        waiting.append(other.is_alive())

    monkeypatch.setattr(call_sequence, "let_training_run", pause)
    ranks[0].run()
    ranks[0].poll()

    assert waiting == [False]
    assert ranks[0].failures("store") == 0


def test_a_store_that_answers_at_last_waits_until_the_costs_are_added_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = ComparedRanks(2)
    one, answers, order = ranks[1].thread, threading.Event(), list[str]()
    ranks.exchange()
    ranks[1].run()
    poll = threading.Thread(target=poll_slow_store, args=(ranks[1], lambda: answers.wait(60)))
    is_awaited, wait, expire = threading.Event(), one._is_free.wait, one._accounting.expire

    def wait_until_free() -> None:
        if answers.is_set():
            is_awaited.set()
        wait()

    def add_up(patience_seconds: float, *, is_compared: bool) -> None:
        if threading.current_thread() is not poll:
            answers.set()
            eventually(lambda: is_awaited.is_set() or not poll.is_alive())
        order.append("poll" if threading.current_thread() is poll else "look")
        expire(patience_seconds, is_compared=is_compared)

    monkeypatch.setattr(one._is_free, "wait", wait_until_free)
    monkeypatch.setattr(one._accounting, "expire", add_up)
    poll.start()
    eventually(lambda: one._in_store_since is not None)
    look_twice(ranks[1], ranks.clock)
    poll.join()

    assert order == ["look", "poll"]


class LostStore(HashStore):
    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("the store does not respond")


def test_slow_ranks_are_unknown_while_the_rank_that_compares_does_not_answer() -> None:
    ranks = ComparedRanks(3)
    compare_a_slow_rank(ranks)
    before = comparison_figures(ranks[2])
    for _ in range(MAX_UNANSWERED_STEP_TIMES + 1):
        ranks[2].steps()
        ranks.exchange(0)

    after = comparison_figures(ranks[2])
    assert before == (True,) * 5
    assert (after[0], after[4]) == (False, False)


def test_what_was_found_is_withdrawn_when_the_store_fails() -> None:
    ranks = ComparedRanks(3)
    compare_a_slow_rank(ranks)
    before = [comparison_figures(rank) for rank in ranks.all]
    ranks.store = LostStore()
    for rank in ranks.all:
        rank.thread._connection._client = ranks.store
        rank.run()
    ranks.exchange()

    assert before == [(True,) * 5] * 3
    assert [comparison_figures(rank) for rank in ranks.all] == [(False,) * 5] * 3


def test_polls_are_frequent_even_where_exchanges_are_rare() -> None:
    assert [poll_interval_seconds(seconds) for seconds in (0.5, 5.0, 120.0)] == [0.1, 1.0, 2.0]


def test_an_announced_hang_makes_heartbeats_be_read_at_once_for_any_own_limit() -> None:
    ranks = ComparedRanks(2)
    ranks[1].phase_timer.seconds = IDLE_SECONDS_BEFORE_HEARTBEATS + 1
    ranks.exchange()
    before = dict(ranks[1].thread.peers)
    ranks[0].thread.announce_hang(True)
    ranks.exchange()

    assert before == {}
    assert ranks[1].thread.others_hang
    assert ranks[1].thread.peers.keys() == {0, 1}


def test_stopping_what_was_never_started_is_harmless() -> None:
    ComparedRanks(1)[0].thread.stop()


def test_a_thread_that_has_ended_leaves_no_connection_to_the_store() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    threads, connected, left = [], [], []
    for index in range(3):
        clients = StoreClientFactory(0, 0, index, default=lambda: server)
        before = num_own_sockets(server.port)
        threads.append(ComparedRank(0, FakeClock(), None, FakeGroup((0, 1))).thread)
        threads[-1]._connection = StoreConnection(clients)
        threads[-1].start()
        threads[-1].report_now()
        connected.append(num_own_sockets(server.port) - before)
        threads[-1].stop()
        left.append(num_own_sockets(server.port) - before)

    assert (connected, left) == ([1] * 3, [0] * 3)


def num_own_sockets(port: int) -> int:
    """Count this process's connections to a port of this machine."""
    connections = psutil.Process().net_connections("tcp")
    return sum(bool(each.raddr) and each.raddr.port == port for each in connections)


SLOW = Straggler(rank=5, phase="forward", seconds=0.05, score=0.1)
REFERENCE = StepTimeReference(step_seconds=0.5, busy_seconds=(0.0, 0.1, 0.2, 0.1, 0.05))
OWN_TIMES = StepTimes(
    num_steps=9,
    step_seconds=0.5,
    busy_seconds=(0.05, 0.1, 0.1, 0.2, 0.05),
    deviation_seconds=(0.0,) * 5,
)


class Reporter:
    """The reporter of one rank of the data-parallel group of ranks 3 and 5."""

    def __init__(self, rank: int) -> None:
        self.clock, self.recorder = FakeClock(), Recorder()
        self.reporter = CompareReporter(self.recorder, rank, self.clock)
        self.rank_set = RankSet((3, 5))
        self.rank_set.roles = ["dp"]

    def publish(self, own: StepTimes | None = None, **fields: object) -> None:
        result = CompareResult(first_call=0, min_durations=NO_DURATIONS, **fields)  # type: ignore
        self.reporter.publish(self.rank_set, result, own)

    def publish_slow(self, *slow: Straggler) -> None:
        self.publish(reference=REFERENCE, stragglers=slow)


@pytest.mark.parametrize(("rank", "num_lines"), [(3, 1), (5, 0)])
def test_a_divergence_is_counted_on_each_rank_and_logged_by_the_first(
    caplog: pytest.LogCaptureFixture, rank: int, num_lines: int
) -> None:
    one = Reporter(rank)
    before = one.recorder.snapshot().value(communication.COLLECTIVE_MISMATCHES)

    one.publish(divergence=Divergence(sequence=7, issued={3: "a", 5: "b"}, diverged=(5,)))

    line = (
        "rank 5 diverged from the common sequence of collectives at call 7 of group dp: issued b, "
        "where the others issued a"
    )
    assert (before, one.recorder.snapshot().value(communication.COLLECTIVE_MISMATCHES)) == (0, 1)
    assert one.reporter.divergence == line
    assert caplog.messages == [line] * num_lines


def test_the_scores_of_this_rank_are_published_by_phase() -> None:
    one = Reporter(5)

    one.publish(OWN_TIMES)  # without a reference there is nothing to compare
    before = dict(one.recorder.snapshot().values)
    one.publish(OWN_TIMES, reference=REFERENCE)

    assert communication.STRAGGLER_SCORE not in before
    assert one.recorder.snapshot().values[communication.STRAGGLER_SCORE] == pytest.approx(
        {
            ("data",): 0.1,
            ("forward",): 0.0,
            ("backward",): -0.2,
            ("optimizer",): 0.2,
            ("other",): 0.0,
        }
    )


def test_the_stragglers_are_those_of_the_last_comparison() -> None:
    one = Reporter(5)

    one.publish_slow(SLOW)
    one.publish()
    kept = one.reporter.stragglers
    one.publish_slow()

    assert (kept, one.reporter.stragglers) == ((SLOW,), ())
    assert communication.STRAGGLER_SCORE not in one.recorder.snapshot().values


def test_slow_ranks_are_unknown_if_step_times_have_no_answer() -> None:
    one, known = Reporter(5), []
    one.publish(OWN_TIMES, reference=REFERENCE, stragglers=(SLOW,))
    for number in range(2 * MAX_UNANSWERED_STEP_TIMES + 1):
        if number == MAX_UNANSWERED_STEP_TIMES:
            one.publish_slow(SLOW)
        one.reporter.expect_reference()
        score = one.recorder.snapshot().value(communication.STRAGGLER_SCORE, "data")
        known.append((score is not None, bool(one.reporter.stragglers)))

    assert known == [(True, True)] * (2 * MAX_UNANSWERED_STEP_TIMES) + [(False, False)]


@pytest.mark.parametrize(("rank", "expected"), [(3, [1, 1, 1, 2]), (5, [0, 0, 0, 0])])
def test_a_change_within_ten_minutes_of_the_last_line_is_logged_later_by_the_first_rank(
    caplog: pytest.LogCaptureFixture, rank: int, expected: list[int]
) -> None:
    one, num_lines = Reporter(rank), []
    for seconds, slow in ((0, (SLOW,)), (300, ()), (299, ()), (1, ())):
        one.clock.seconds += seconds
        one.publish_slow(*slow)
        num_lines.append(len(caplog.records))

    assert num_lines == expected
    if rank == 3:
        assert caplog.messages == [SLOW.message(), "rank 5 is no longer slow in forward"]


@pytest.mark.parametrize(
    ("only_grows", "num_heartbeats", "num_reports"), [(True, 6 + 60, 6), (False, 60 + 60, 24)]
)
def test_less_is_written_to_a_store_that_only_grows(
    tmp_path: Path, only_grows: bool, num_heartbeats: int, num_reports: int
) -> None:
    store: Store = FileStore(str(tmp_path / "file"), 1) if only_grows else HashStore()
    clock = FakeClock()
    rank = ComparedRank(0, clock, lambda: PrefixStore("job", store), FakeGroup((0, 1))).connect()

    for second in range(120):
        rank.phase_timer.seconds = max(0.0, second - 54.0)  # more than 5 s idle in the second half
        rank.poll()
        clock.seconds += 1

    written = PrefixStore("job", store)
    assert json.loads(written.get("beat/0"))["count"] == num_heartbeats
    assert int(written.get("report/0/latest")) + 1 == num_reports


def test_a_rank_that_trains_over_a_store_that_only_grows_is_not_silent(tmp_path: Path) -> None:
    clock, file, sets = FakeClock(), str(tmp_path / "file"), FakeGroup((0, 1))
    stuck, trains = (
        ComparedRank(rank, clock, lambda: FileStore(file, 2), sets).connect() for rank in (0, 1)
    )
    beats: list[Heartbeat] = []

    for second in range(120):
        stuck.phase_timer.seconds = float(second)
        for rank in (stuck, trains):
            rank.poll()
            clock.seconds += 1
        beats += [beat for beat in stuck.thread.peers.values() if beat.rank == 1]

    assert max(beat.age_seconds or 0.0 for beat in beats) > SILENT_SECONDS
    assert max(beat.overdue_seconds for beat in beats) <= SILENT_SECONDS
