"""Tests of statistics over ranks: closed forms, ranks over one store, gaps.

`figure_collector.py` is tested here too.
"""

from __future__ import annotations

import math
from statistics import median

import numpy as np
import pytest
from fakes.clock import FakeClock
from fakes.comparison_threads import INTERVAL_SECONDS, ComparedRank, ComparedRanks
from recorded_runs import step_record
from torch.distributed import HashStore

from zerowatch.metrics.catalog import communication, memory
from zerowatch.metrics.catalog.across_ranks import (
    METRICS,
    RANKS_EXTREME,
    RANKS_OOM_RISK,
    RANKS_REPORTING,
    RANKS_SAME_LOSS,
    RANKS_STEP_DURATION,
    STATISTICS,
)
from zerowatch.metrics.catalog.training import STEP_DURATION_QUANTILE
from zerowatch.metrics.recorder import Recorder, Snapshot
from zerowatch.runtime.cross_rank.exchange.rank_messages import decode_report
from zerowatch.runtime.cross_rank.exchange.store_channel import PATIENCE_EXCHANGES
from zerowatch.runtime.cross_rank.rank_figures import NUM_FIGURES
from zerowatch.runtime.cross_rank.rank_statistics import RankStatistics


def figures(**known: float) -> np.ndarray:
    values = np.full(NUM_FIGURES, np.nan, np.float32)
    values[: len(STATISTICS)] = [known.get(name, math.nan) for name in STATISTICS]
    return values


def statistics(snapshot: Snapshot, figure: str) -> dict[str, float]:
    return {stat: value for (stat,), value in snapshot.values.get(STATISTICS[figure], {}).items()}


def test_statistics_are_those_of_the_ranks_that_have_the_figure() -> None:
    recorder = Recorder()
    RankStatistics(recorder).publish(
        {3: figures(mfu=0.5, data=0.25), 0: figures(mfu=0.25), 7: figures(mfu=0.75), 9: figures()}
    )

    snapshot = recorder.snapshot()
    assert statistics(snapshot, "mfu") == {"min": 0.25, "median": 0.5, "max": 0.75}
    assert statistics(snapshot, "data") == {"min": 0.25, "median": 0.25, "max": 0.25}
    assert statistics(snapshot, "oom_risk") == {}
    assert snapshot.values[RANKS_EXTREME] == {
        ("mfu", "min"): 0,
        ("mfu", "max"): 7,
        ("data", "min"): 3,
        ("data", "max"): 3,
    }
    assert snapshot.value(RANKS_REPORTING, "mfu") == 3
    assert snapshot.value(RANKS_REPORTING, "data") == 1
    assert snapshot.value(RANKS_REPORTING, "oom_risk") == 0


def test_a_figure_that_no_rank_has_any_more_is_removed() -> None:
    recorder = Recorder()
    published = RankStatistics(recorder)
    published.publish({0: figures(mfu=0.5), 1: figures(mfu=0.25)})

    published.publish({})

    snapshot = recorder.snapshot()
    assert statistics(snapshot, "mfu") == {}
    assert snapshot.values[RANKS_EXTREME] == {}
    assert set(snapshot.values[RANKS_REPORTING].values()) == {0}


def test_their_number_does_not_depend_on_the_number_of_ranks() -> None:
    recorder = Recorder()
    every = np.ones(NUM_FIGURES, np.float32)
    RankStatistics(recorder).publish(dict.fromkeys(range(1024), every))

    snapshot = recorder.snapshot()
    assert sum(len(snapshot.values[spec]) for spec in STATISTICS.values()) == 30
    assert sum(len(snapshot.values[spec]) for spec in METRICS if spec in snapshot.values) == 60


class Job:
    """Ranks that have no collective in common, as those of a job of many groups."""

    def __init__(self, num_ranks: int) -> None:
        self.clock, self.store = FakeClock(), HashStore()
        self.ranks = [self._join(rank, num_ranks) for rank in range(num_ranks)]

    def _join(self, rank: int, num_ranks: int) -> ComparedRank:
        joined = ComparedRank(rank, self.clock, lambda: self.store, world_size=num_ranks)
        joined.recorder.set(STEP_DURATION_QUANTILE, step_seconds(rank), "0.5")
        return joined.connect()

    def exchange(self, *silent: int, times: int = 1) -> Snapshot:
        for _ in range(5 * times):
            for rank in self.ranks:
                if rank.rank not in silent:
                    rank.poll()
            self.clock.seconds += INTERVAL_SECONDS / 5
        return self.ranks[0].recorder.snapshot()


def step_seconds(rank: int) -> float:
    return 1.0 + (37 * rank % 101) / 64


@pytest.mark.parametrize("num_ranks", [2, 64, 130])
def test_rank_zero_has_the_statistics_of_all_ranks(num_ranks: int) -> None:
    job = Job(num_ranks)

    snapshot = job.exchange(times=3)

    durations = [step_seconds(rank) for rank in range(num_ranks)]
    assert statistics(snapshot, "step_duration") == {
        "min": min(durations),
        "median": median(durations),
        "max": max(durations),
    }
    assert snapshot.value(RANKS_REPORTING, "step_duration") == num_ranks
    assert snapshot.value(RANKS_EXTREME, "step_duration", "max") == np.argmax(durations)
    assert [rank.fail_open.failures for rank in job.ranks] == [{}] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 66])
@pytest.mark.parametrize("is_same", [True, False])
def test_rank_zero_finds_equal_losses_in_the_reports_of_all_ranks(
    num_ranks: int, is_same: bool
) -> None:
    job = Job(num_ranks)
    for rank in job.ranks:
        rank.thread.compare_losses()
        for step in range(1, 100):
            has_own_data = not is_same and rank.rank == num_ranks - 1
            loss = 1 / step + (1e-9 if has_own_data else 0.0)
            rank.thread.on_step(step_record(step, loss=loss))

    snapshot = job.exchange(times=3)

    assert snapshot.value(RANKS_SAME_LOSS) == is_same
    assert RANKS_SAME_LOSS not in job.ranks[1].recorder.snapshot().values


def test_losses_are_not_compared_where_ranks_share_samples() -> None:
    job = Job(2)
    for rank in job.ranks:
        for step in range(1, 100):
            rank.thread.on_step(step_record(step))

    assert RANKS_SAME_LOSS not in job.exchange(times=3).values


def test_other_ranks_publish_no_statistics() -> None:
    job = Job(66)

    job.exchange(times=3)

    for rank in (1, 64, 65):
        assert RANKS_STEP_DURATION not in job.ranks[rank].recorder.snapshot().values


@pytest.mark.parametrize("silent", [(3,), (64,), (65,)])
def test_a_rank_that_falls_silent_is_left_out_and_joins_again(silent: tuple[int, ...]) -> None:
    job = Job(66)
    job.exchange(times=3)

    lost = job.exchange(*silent, times=2 * PATIENCE_EXCHANGES + 3)
    back = job.exchange(times=2 * PATIENCE_EXCHANGES)

    # While the first rank of a block is silent, nobody forwards the figures of its block.
    missing = 66 - 64 if silent == (64,) else len(silent)
    assert lost.value(RANKS_REPORTING, "step_duration") == 66 - missing
    assert back.value(RANKS_REPORTING, "step_duration") == 66
    assert [rank.failures("peer") for rank in job.ranks] == [0] * 66


@pytest.mark.parametrize("num_ranks", [3, 66])
def test_statistics_follow_the_figures_in_a_job_whose_ranks_share_a_group(num_ranks: int) -> None:
    ranks = ComparedRanks(num_ranks)
    for value in (0.25, 0.75):
        for rank in ranks.all:
            rank.recorder.set(memory.OOM_RISK, value if rank.rank else value / 2, "cpu")
            rank.run()
        ranks.exchange(times=3)

        snapshot = ranks[0].recorder.snapshot()
        assert statistics(snapshot, "oom_risk") == {"min": value / 2, "median": value, "max": value}
        assert snapshot.value(RANKS_EXTREME, "oom_risk", "min") == 0


def test_only_the_first_rank_of_a_block_forwards_figures() -> None:
    job = Job(66)
    job.exchange(times=3)

    sent = {
        rank: decode_report(job.store.get(f"report/{rank}/2")).figures.keys() for rank in (0, 1, 64)
    }

    assert sent == {0: set(), 1: {1}, 64: {64, 65}}


def test_a_rank_without_a_figure_is_left_out() -> None:
    job = Job(4)
    job.ranks[1].recorder.set(memory.OOM_RISK, 0.5, "cpu")
    job.ranks[2].recorder.set(memory.OOM_RISK, 0.25, "cpu")

    snapshot = job.exchange(times=2)

    assert snapshot.values[RANKS_OOM_RISK] == {("min",): 0.25, ("median",): 0.375, ("max",): 0.5}
    assert snapshot.value(RANKS_REPORTING, "oom_risk") == 2


def test_while_the_store_fails_there_are_no_statistics() -> None:
    job = Job(2)
    job.exchange(times=2)
    thread = job.ranks[0].thread
    with thread._store_may_fail(thread._connection):
        raise RuntimeError("no answer")

    snapshot = job.exchange(times=1)

    assert statistics(snapshot, "step_duration") == {}
    assert snapshot.value(RANKS_REPORTING, "step_duration") == 0


def test_a_rank_whose_figures_cannot_be_read_still_takes_part_in_the_comparison() -> None:
    ranks = ComparedRanks(2)
    ranks[1].recorder.set_function(memory.OOM_RISK, lambda: 1 / 0, "cpu")
    for rank, milliseconds in zip(ranks.all, (10, 4), strict=True):
        rank.run(milliseconds)

    ranks.exchange(times=2)

    assert ranks[1].fail_open.failures == {"rank figures": 1}
    assert ranks[0].milliseconds(communication.COMM_WAIT_SECONDS, "dp") == pytest.approx(6)
