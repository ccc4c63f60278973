"""Tests of the batch split: it follows speed, agrees on all ranks, changes only for a gain."""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fakes.steps import step as a_step

from zerowatch.metrics.step_record import StepRecord
from zerowatch.runtime.trainer.data.balancer import (
    EVERY_WINDOWS,
    WARM_UP_WINDOWS,
    Balancer,
    BusyTime,
    EndedWindow,
    SplitTrial,
    better_split,
    smoothed,
)
from zerowatch.runtime.trainer.data.batch_split import (
    MAX_CHANGES,
    SplitSchedule,
    busy_seconds,
    even_split,
    fastest_split,
    gain,
    resized_split,
)
from zerowatch.runtime.trainer.data.training_data import (
    BatchLearningRate,
    TrainingData,
    scaling_exponent,
)

NO_LIMITS = (math.inf, math.inf)


def exhaustive_best(total: int, seconds: Sequence[float], limits: Sequence[float]) -> float:
    """Return the shortest time over all possible splits."""
    ways = itertools.product(range(1, total + 1), repeat=len(seconds))
    return min(
        busy_seconds(way, seconds)
        for way in ways
        if sum(way) == total and all(n <= limit for n, limit in zip(way, limits, strict=True))
    )


@pytest.mark.parametrize(
    ("total", "seconds", "split"),
    [
        (12, (1, 1), (6, 6)),
        (12, (1, 2), (8, 4)),
        (13, (1, 2), (9, 4)),
        (7, (1, 1, 1), (3, 2, 2)),
        (4, (1, 100), (3, 1)),
    ],
)
def test_a_faster_rank_gets_more_samples(total, seconds, split):
    assert fastest_split(total, seconds) == split


def test_the_fastest_split_equals_an_exhaustive_search(seed):
    numbers = random.Random(seed)
    for _ in range(60):
        ranks = numbers.choice((2, 3))
        total = numbers.randint(ranks, 9)
        seconds = [numbers.uniform(0.1, 1) for _ in range(ranks)]
        limits = [numbers.choice((math.inf, numbers.randint(total // ranks + 1, total)))] * ranks

        split = fastest_split(total, seconds, limits)

        assert sum(split) == total
        assert busy_seconds(split, seconds) == exhaustive_best(total, seconds, limits)


def test_samples_above_a_ranks_limit_go_to_the_others():
    assert fastest_split(12, (1, 2), (7, math.inf)) == (7, 5)


@pytest.mark.parametrize("limits", [(1, 1), (5, 0)])
def test_a_batch_above_the_sum_of_limits_raises(limits):
    with pytest.raises(ValueError, match="3 samples cannot be divided over 2 ranks"):
        fastest_split(3, (1, 1), limits)


def test_a_batch_with_fewer_samples_than_ranks_raises():
    with pytest.raises(ValueError, match="2 samples cannot be divided over 3 ranks"):
        fastest_split(2, (1, 1, 1))


def test_gain_is_the_speedup_minus_1():
    assert gain((6, 6), (8, 4), (1, 2)) == pytest.approx(0.5)


def test_the_split_of_a_smaller_batch_keeps_its_proportions():
    assert resized_split((8, 4), 6) == (4, 2)
    assert resized_split((8, 4), 12) == (8, 4)
    assert resized_split((8, 4), 2) == (1, 1)


def test_a_small_gain_does_not_change_the_split():
    assert better_split((50, 50), (1, 1.04), NO_LIMITS) is None
    assert better_split((50, 50), (1, 1.2), NO_LIMITS) == (55, 45)


def test_a_split_above_a_ranks_limit_changes_without_a_gain():
    assert better_split((6, 6), (1, 1), (5, math.inf)) == (5, 7)


def test_limits_below_the_batch_do_not_change_the_split():
    assert better_split((6, 6), (1, 9), (5, 5)) is None


def test_a_schedule_starts_even_and_changes_at_an_index():
    schedule = SplitSchedule(12, 2)

    schedule.change(3, (8, 4))
    schedule.change(5, (7, 5))

    assert [schedule.split_at(index)[0] for index in range(7)] == [6, 6, 6, 8, 8, 7, 7]
    assert schedule.latest == (7, 5)


def test_a_split_that_was_read_cannot_be_changed():
    schedule = SplitSchedule(12, 2)
    schedule.split_at(4)

    with pytest.raises(ValueError, match="shares can change from batch 5 on"):
        schedule.change(4, (8, 4))


def test_a_later_change_replaces_one_that_is_not_in_effect_yet():
    schedule = SplitSchedule(12, 2)

    schedule.change(9, (8, 4))
    schedule.change(7, (7, 5))

    assert [schedule.split_at(index)[0] for index in (6, 7, 9)] == [6, 7, 7]


@pytest.mark.parametrize("split", [(8, 5), (12, 0), (4, 4, 4)])
def test_an_invalid_split_raises(split):
    with pytest.raises(ValueError, match="no shares of 12 samples for 2 ranks"):
        SplitSchedule(12, 2).change(1, split)


def test_a_loaded_schedule_equals_the_saved_one():
    saved = SplitSchedule(12, 2)
    saved.change(3, (8, 4))
    saved.change(6, (7, 5))
    restored = SplitSchedule(12, 2)

    assert restored.load_state_dict(saved.state_dict())

    assert [restored.split_at(i) for i in range(9)] == [saved.split_at(i) for i in range(9)]


@pytest.mark.parametrize("other", [(12, 3), (16, 2)])
def test_a_schedule_of_other_ranks_or_batches_is_ignored(other):
    saved = SplitSchedule(*other)
    schedule = SplitSchedule(12, 2)

    assert not schedule.load_state_dict(saved.state_dict())
    assert schedule.split_at(0) == (6, 6)


def test_a_schedule_keeps_a_bounded_number_of_changes():
    schedule = SplitSchedule(12, 2)

    for index in range(1000):
        schedule.change(index, (5 + index % 2, 7 - index % 2))

    assert len(schedule.state_dict()["changes"]) == MAX_CHANGES
    assert schedule.split_at(999) == (6, 6)


def test_busy_time_is_the_median_per_sample():
    busy = BusyTime(collectives_inside=False)
    for step, seconds in enumerate((0.4, 0.4, 9.0)):
        busy.add(step, 4, seconds)

    assert busy.drain() == pytest.approx(0.1)
    assert busy.drain() is None


def test_busy_time_excludes_the_time_blocked_by_collectives_once_known():
    busy = BusyTime(collectives_inside=True)
    for step in (1, 2, 3):
        busy.add(step, 2, 1.0)
    assert busy.drain() is None

    busy.add_blocked(1, 0.6)
    busy.add_blocked(2, 0.6)
    assert busy.drain() == pytest.approx(0.2)

    busy.add_blocked(3, 0.8)
    assert busy.drain() == pytest.approx(0.1)


class RecordSource:
    """Watch that gives records to its listener."""

    is_open = True

    def subscribe_internal(self, listener: Callable[[StepRecord], None]) -> None:
        self.publish = listener


class TwoEqualRanks:
    """Host group of rank 0, whose peer has the same values."""

    rank, world_size = 0, 2

    def all_gather(self, values: Sequence[float]) -> np.ndarray:
        return np.array([values, values])

    def all_gather_text(self, text: str, num_bytes: int | None = None) -> list[str]:
        return [text, text]

    def all_max(self, value: int) -> int:
        return value


def test_a_vote_within_the_passes_is_subtracted_from_their_wall_time_once() -> None:
    watch = RecordSource()
    engine = SimpleNamespace(watch=watch, seq_dp_world_size=2, sequence_parallel_size=1)
    holder = SimpleNamespace(engine=engine)
    data = TrainingData(TwoEqualRanks(), holder, balance=True)
    batches = data.loader(list(range(96)), batch_samples=12).forever()

    for step in range(EVERY_WINDOWS):
        next(batches)
        watch.publish(replace(a_step(step), comm_exposed_phase_seconds={"backward": 0.012}))
        data.on_window_end(step=step, num_samples=6, seconds=0.024, collectives_inside=True)

    assert data.state_dict()["shares"]["sample_seconds"] == pytest.approx([0.002, 0.002])


class ThreadRanks:
    """State shared by the host groups of ranks that are threads."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=120)
        self.values: list[list[float]] = [[]] * num_ranks


class ThreadHostGroup:
    """Host group of one rank that is a thread."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self.ranks, self.rank = ranks, rank

    def all_gather(self, values: Sequence[float]) -> np.ndarray:
        self.ranks.values[self.rank] = list(values)
        self.ranks.barrier.wait()
        gathered = np.array(self.ranks.values)
        self.ranks.barrier.wait()
        return gathered


class FixedHostGroup:
    """Host group that gathers given values; records what this rank sent."""

    def __init__(self, gathered: Callable[[Sequence[float]], np.ndarray]) -> None:
        self.gathered = gathered
        self.sent: list[list[float]] = []

    def all_gather(self, values: Sequence[float]) -> np.ndarray:
        self.sent.append(list(values))
        return self.gathered(values)


def balanced(
    speeds: Callable[[int], Sequence[float]],
    *,
    windows: int,
    batch: int = 12,
    ahead: Sequence[int] = (0, 0),
    limits: Sequence[float] = NO_LIMITS,
    overhead: Callable[[tuple[int, ...]], float] = lambda split: 0.0,
) -> list[tuple[int, ...]]:
    """Run windows with the seconds per sample of `speeds`; return the split of each window."""
    ranks = ThreadRanks(len(ahead))

    def run(rank: int) -> list[tuple[int, ...]]:
        schedule = SplitSchedule(batch, len(ahead))
        host_group = ThreadHostGroup(ranks, rank)
        balancer = Balancer(schedule, host_group, BusyTime(collectives_inside=False))
        seen = []
        for index in range(windows):
            schedule.split_at(index + ahead[rank])
            seen.append(schedule.split_at(index))
            busy = [share * each for share, each in zip(seen[-1], speeds(index), strict=True)]
            balancer.on_window_end(
                EndedWindow(
                    index=index,
                    step=index,
                    num_samples=seen[-1][rank],
                    passes_seconds=busy[rank],
                    seconds=max(busy) + overhead(seen[-1]),
                    max_samples=limits[rank],
                )
            )
        return seen

    with ThreadPoolExecutor(len(ahead)) as threads:
        first, *others = threads.map(run, range(len(ahead)))
    assert all(other == first for other in others), "the ranks disagree"
    return first


def test_ranks_of_different_speed_end_windows_together():
    split = balanced(lambda index: (0.1, 0.2), windows=20)

    assert split[:8] == [(6, 6)] * 8
    assert split[8:] == [(8, 4)] * 12


def test_equal_ranks_keep_an_even_split():
    split = balanced(lambda index: (0.1, 0.103), windows=40, batch=64)

    assert set(split) == {(32, 32)}


def test_a_change_applies_after_what_any_rank_has_loaded_ahead():
    split = balanced(lambda index: (0.1, 0.2), windows=24, ahead=(0, 5))

    assert split[:13] == [(6, 6)] * 13  # decided after batch 7, when rank 1 had loaded batch 12
    assert split[13:] == [(8, 4)] * 11


def test_the_split_follows_a_rank_that_becomes_faster():
    split = balanced(lambda index: (0.1, 0.2 if index < 20 else 0.1), windows=60)

    assert (split[19], split[-1]) == ((8, 4), (6, 6))


def test_a_local_batch_does_not_exceed_its_ranks_limit():
    split = balanced(lambda index: (0.1, 0.2), windows=20, limits=(7, math.inf))

    assert split[-1] == (7, 5)


def test_a_split_that_does_not_make_windows_faster_is_reverted():
    """For example, when a larger local batch needs one more micro-batch, with its communication."""
    split = balanced(
        lambda index: (0.1, 0.2),
        windows=200,
        overhead=lambda split: 0.0 if split[0] == 6 else 0.6,
    )

    assert split[8:24] == [(8, 4)] * 8 + [(6, 6)] * 8
    assert split[24:136] == [(6, 6)] * 112  # paused before the next trial
    assert (8, 4) in split[136:]


def test_a_split_that_makes_windows_faster_stays_despite_an_overhead():
    split = balanced(
        lambda index: (0.1, 0.2), windows=80, overhead=lambda split: 0.0 if split[0] == 6 else 0.2
    )

    assert set(split[8:]) == {(8, 4)}


def window(step: int, num_samples: int, passes_seconds: float) -> EndedWindow:
    return EndedWindow(
        index=step,
        step=step,
        num_samples=num_samples,
        passes_seconds=passes_seconds,
        seconds=passes_seconds,
    )


def test_the_split_stays_while_a_rank_has_no_measurement():
    schedule = SplitSchedule(12, 2)
    gathered = np.array([[0.1, 8, math.inf, 1], [math.nan, 8, math.inf, 1]])
    host_group = FixedHostGroup(lambda values: gathered)
    balancer = Balancer(schedule, host_group, BusyTime(collectives_inside=True))

    for step in range(8):
        assert balancer.on_window_end(window(step, 6, 0.6)) is None

    assert schedule.latest == (6, 6)


def test_warm_up_windows_are_not_measured():
    host_group = FixedHostGroup(lambda values: np.array([values]))
    balancer = Balancer(SplitSchedule(4, 1), host_group, BusyTime(collectives_inside=False))
    for step in range(8):
        balancer.on_window_end(window(step, 4, 99.0 if step < WARM_UP_WINDOWS else 1.0))

    assert [values[0] for values in host_group.sent] == [0.25]


def test_a_loaded_balancer_has_the_saved_split():
    gathered = np.array([[0.1, 8, math.inf, 1], [0.2, 8, math.inf, 1]])

    def new_balancer() -> Balancer:
        host_group = FixedHostGroup(lambda values: gathered)
        return Balancer(SplitSchedule(12, 2), host_group, BusyTime(collectives_inside=False))

    saved = new_balancer()
    for step in range(8):
        saved.on_window_end(window(step, 6, 0.6))
    restored = new_balancer()
    restored.load_state_dict(saved.state_dict())

    assert restored.schedule.split_at(8) == (8, 4)
    assert restored.state_dict() == saved.state_dict()


def test_an_even_split_adds_up():
    assert even_split(8, 3) == (3, 3, 2)


def two_ranks(of_peer: Sequence[float]) -> tuple[Balancer, list[list[float]]]:
    """Return a balancer whose peer sends the given values, and the list of what it sends."""
    host_group = FixedHostGroup(lambda values: np.array([values, of_peer[-len(values) :]]))
    balancer = Balancer(SplitSchedule(12, 2), host_group, BusyTime(collectives_inside=False))
    return balancer, host_group.sent


def test_starting_to_balance_uses_earlier_measurements_from_the_next_batch_on():
    balancer, sent = two_ranks([0.2, 5])
    for step in range(20):
        balancer.measure(window(step, 6, 0.6))
    assert not sent

    assert balancer.start() == (8, 4)
    assert [balancer.schedule.split_at(index)[0] for index in (4, 5)] == [6, 8]


def test_stopping_to_balance_returns_to_an_even_split_once():
    balancer, sent = two_ranks([0.2, 5])
    for step in range(20):
        balancer.measure(window(step, 6, 0.6))
    balancer.start()
    balancer.schedule.split_at(8)

    assert balancer.stop() == (6, 6)
    assert [balancer.schedule.split_at(index)[0] for index in (8, 9)] == [8, 6]
    num_sent = len(sent)
    assert balancer.stop() is None
    assert len(sent) == num_sent


def test_starting_without_measurements_keeps_an_even_split():
    balancer, _ = two_ranks([math.nan, 0])

    assert balancer.start() is None
    assert balancer.schedule.latest == (6, 6)


def test_busy_time_ignores_old_windows():
    busy = BusyTime(collectives_inside=False)
    for step in range(200):
        busy.add(step, 1, 0.1 if step < 160 else 0.4)

    assert busy.drain() == pytest.approx(0.4)


class RecordingOptimizer:
    """Optimizer that records the learning rate of each update."""

    def __init__(self) -> None:
        self.param_groups, self.rates = [{"lr": 0.1}], []

    def step(self) -> None:
        self.rates.append(self.param_groups[0]["lr"])


class AdamLike(RecordingOptimizer):
    pass


class SGDLike(RecordingOptimizer):
    pass


class Lion(RecordingOptimizer):
    pass


@pytest.mark.parametrize(("kind", "factor"), [(AdamLike, 2.0), (SGDLike, 4.0)])
def test_the_learning_rate_is_scaled_during_an_update_only(kind, factor):
    optimizer, source = kind(), SimpleNamespace(batch_ratio=1.0)
    undo = BatchLearningRate(source).attach(SimpleNamespace(basic_optimizer=optimizer))
    optimizer.step()
    source.batch_ratio = 4.0
    optimizer.step()
    assert optimizer.param_groups == [{"lr": 0.1}]
    undo()
    optimizer.step()

    assert optimizer.rates == pytest.approx([0.1, 0.1 * factor, 0.1])
    assert "step" not in vars(optimizer)


def test_an_unknown_optimizer_has_no_scaling_rule():
    assert scaling_exponent(Lion()) is None


@pytest.mark.parametrize(
    ("now", "min_gain", "split"),
    [((6, 6), 0.5, (8, 4)), ((6, 6), 0.51, None), ((7, 5), 0.5, None)],
)
def test_a_split_changes_from_the_least_gain_on(
    now: tuple[int, int], min_gain: float, split: tuple[int, int] | None
) -> None:
    assert better_split(now, (1, 2), NO_LIMITS, min_gain=min_gain) == split


@pytest.mark.parametrize(("now", "split"), [((26, 24), None), ((53, 47), (50, 50))])
def test_a_gain_of_five_per_cent_changes_the_split(
    now: tuple[int, int], split: tuple[int, int] | None
) -> None:
    assert better_split(now, (1, 1), NO_LIMITS) == split


def test_limits_that_are_just_reached_leave_the_split_and_just_fit_a_batch() -> None:
    assert better_split((6, 6), (1, 1), (6, math.inf)) is None
    assert better_split((6, 6), (1, 1), (5, 7)) == (5, 7)


def test_measurements_are_averaged_with_those_of_as_many_ranks() -> None:
    assert smoothed((), (1.0, 2.0)) == (1.0, 2.0)
    assert smoothed((2.0, 4.0), (4.0, 12.0)) == (3.0, 8.0)


@pytest.mark.parametrize("max_samples", [(1, math.inf), (2, math.inf)])
def test_a_ranks_largest_local_batch_is_reached_and_not_exceeded(
    max_samples: tuple[float, float],
) -> None:
    assert fastest_split(9, (1, 1), max_samples) == (max_samples[0], 9 - max_samples[0])


@pytest.mark.parametrize(
    ("num_samples", "num_ranks", "split"),
    [(11, 3, (4, 4, 3)), (9, 3, (3, 3, 3)), (2, 3, (1, 1, 0))],
)
def test_an_even_split_has_the_larger_batches_first(
    num_samples: int, num_ranks: int, split: tuple[int, ...]
) -> None:
    assert even_split(num_samples, num_ranks) == split


def test_a_batch_that_every_rank_gets_one_sample_of_is_divided() -> None:
    assert fastest_split(2, (1, 5)) == (1, 1)


def test_windows_whose_blocked_time_is_missing_are_dropped_and_later_ones_wait() -> None:
    busy = BusyTime()
    for step, seconds in ((1, 1.0), (2, 9.0), (3, 2.0), (4, 0.5)):
        busy.add(step, 5, seconds)
    busy.add_blocked(1, 0.5)
    busy.add_blocked(3, 1.0)

    assert busy.drain() == pytest.approx((0.1 + 0.2) / 2)
    busy.add_blocked(2, 0.0)
    assert busy.drain() is None
    busy.add_blocked(4, 0.25)
    assert busy.drain() == pytest.approx(0.05)


def test_more_blocked_time_than_wall_time_counts_as_no_time() -> None:
    busy = BusyTime()
    busy.add(1, 5, 1.0)
    busy.add_blocked(1, 1.5)

    assert busy.drain() == 0.0


def trial_of(seconds: float, from_index: int = 5) -> SplitTrial:
    trial = SplitTrial()
    trial.on_change((7, 5), from_index, seconds)
    return trial


@pytest.mark.parametrize(
    ("seconds", "reverts"), [(49.0, False), (49.01, True), (50.0, True), (51.0, True)]
)
def test_a_new_split_stays_if_windows_are_two_per_cent_faster(
    seconds: float, reverts: bool
) -> None:
    trial = trial_of(50.0)

    assert trial.is_running
    assert trial.revert_to(5, seconds) == ((7, 5) if reverts else None)
    assert not trial.is_running


def test_windows_from_before_the_change_are_not_evaluated() -> None:
    trial = trial_of(50.0)

    assert trial.revert_to(4, 90.0) is None
    assert trial.is_running
    assert trial.revert_to(5, 90.0) == (7, 5)


def pause_of(trial: SplitTrial) -> int:
    """Return the number of exchanges until the split may change again."""
    pause = 1
    while trial.is_paused():
        pause += 1
    return pause


def fails(trial: SplitTrial) -> None:
    """Try a split that is reverted, which itself is no trial."""
    trial.on_change((7, 5), 5, 50.0)
    assert trial.revert_to(5, 50.0) == (7, 5)
    trial.on_change((8, 4), 9, 50.0)
    assert not trial.is_running


def test_the_pause_after_a_reverted_split_doubles_from_16_to_1024_exchanges() -> None:
    trial, pauses = SplitTrial(), []
    assert not trial.is_paused()

    for _ in range(8):
        fails(trial)
        pauses.append(pause_of(trial))

    assert pauses == [16, 32, 64, 128, 256, 512, 1024, 1024]


def test_a_split_that_makes_windows_faster_shortens_the_next_pause() -> None:
    trial = SplitTrial()
    for _ in range(3):
        fails(trial)
        pause_of(trial)

    trial.on_change((7, 5), 5, 50.0)
    trial.revert_to(5, 10.0)
    fails(trial)

    assert pause_of(trial) == 16


def balancer_of(peer: Sequence[float]) -> tuple[Balancer, list[list[float]]]:
    """Return a balancer of rank 0 whose peer sends these last values, and what it sends."""
    host_group = FixedHostGroup(lambda values: np.array([values, peer]))
    return (
        Balancer(SplitSchedule(12, 2), host_group, BusyTime(collectives_inside=False)),
        host_group.sent,
    )


def ended(index: int, seconds: float, passes_seconds: float | None = 0.6) -> EndedWindow:
    return EndedWindow(
        index=index,
        step=index,
        num_samples=6,
        passes_seconds=passes_seconds,
        seconds=seconds,
        max_samples=11,
    )


def test_the_ranks_exchange_the_median_of_eight_windows() -> None:
    balancer, sent = balancer_of([0.1, 0, math.inf, 1.0])

    for index, seconds in enumerate((1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 30.0) * 2):
        passes = 0.6 if index < 8 else None
        assert balancer.on_window_end(ended(index, seconds, passes)) is None

    assert sent == [[pytest.approx(0.1), 0, 11, 4.5]] * 2  # the last measurement stays known


def test_dropped_times_are_not_exchanged() -> None:
    balancer, sent = balancer_of([0.1, 0, math.inf, 1.0])
    for index in range(7):
        balancer.on_window_end(ended(index, 99.0))

    balancer.reset_times()
    for index in range(7, 15):
        assert sent == []
        balancer.on_window_end(ended(index, 1.0))

    assert [values[3] for values in sent] == [1.0]


def test_a_trial_ends_with_the_first_eight_windows_of_the_new_split() -> None:
    balancer, _ = balancer_of([0.2, 8, math.inf, 1.0])

    splits = [balancer.on_window_end(ended(index, 1.0)) for index in range(16)]

    assert splits == [None] * 7 + [(8, 4)] + [None] * 7 + [(6, 6)]


def test_the_slowest_rank_decides_whether_windows_are_faster() -> None:
    """This rank becomes faster, the peer does not: 1 s per window before and after."""
    balancer, _ = balancer_of([0.2, 8, math.inf, 1.0])

    splits = [
        balancer.on_window_end(ended(index, 1.0 if index < 8 else 0.2)) for index in range(16)
    ]

    assert splits[-1] == (6, 6)


def test_a_loaded_state_of_other_ranks_has_no_measurements_for_these() -> None:
    balancer, _ = balancer_of([0.2, 8, math.inf, 1.0])
    other = {"changes": [[0, [4, 4, 4]]], "sample_seconds": [0.1, 0.2, 0.3]}

    balancer.load_state_dict(other)

    assert balancer.state_dict() == {"changes": [[0, [6, 6]]], "sample_seconds": []}


def test_the_split_of_a_batch_counts_as_read() -> None:
    schedule = SplitSchedule(12, 2)

    schedule.split_at(4)
    schedule.split_at(2)

    assert schedule.next_index == 5
    schedule.change(5, (7, 5))
    assert schedule.state_dict() == {"changes": [[0, [6, 6]], [5, [7, 5]]]}


def test_a_change_from_the_same_batch_on_replaces_the_earlier_change() -> None:
    schedule = SplitSchedule(12, 2)

    schedule.change(3, (8, 4))
    schedule.change(3, (7, 5))

    assert schedule.state_dict() == {"changes": [[0, [6, 6]], [3, [7, 5]]]}
