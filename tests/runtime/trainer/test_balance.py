"""Shares by speed: whole samples, agreed by all ranks, and changed only where it is worth it."""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from zerowatch.runtime.trainer.data.balancer import (
    WARM_UP_WINDOWS,
    Balancer,
    EndedWindow,
    better_shares,
)
from zerowatch.runtime.trainer.data.busy_time import BusyTime
from zerowatch.runtime.trainer.data.learning_rate import BatchLearningRate, scaling_exponent
from zerowatch.runtime.trainer.data.schedule import MAX_CHANGES, ShareSchedule
from zerowatch.runtime.trainer.data.shares import (
    busy_seconds,
    even_shares,
    fitting_shares,
    gain,
    resized,
)

FREE = (math.inf, math.inf)


def best_by_trying(total: int, seconds: Sequence[float], most: Sequence[float]) -> float:
    """The least time of all ways to share out."""
    ways = itertools.product(range(1, total + 1), repeat=len(seconds))
    return min(
        busy_seconds(way, seconds)
        for way in ways
        if sum(way) == total and all(n <= limit for n, limit in zip(way, most, strict=True))
    )


@pytest.mark.parametrize(
    ("total", "seconds", "shares"),
    [
        (12, (1, 1), (6, 6)),
        (12, (1, 2), (8, 4)),
        (13, (1, 2), (9, 4)),
        (7, (1, 1, 1), (3, 2, 2)),
        (4, (1, 100), (3, 1)),
    ],
)
def test_shares_follow_the_speeds(total, seconds, shares):
    assert fitting_shares(total, seconds) == shares


def test_no_other_shares_end_earlier():
    numbers = random.Random(0)
    for _ in range(60):
        ranks = numbers.choice((2, 3))
        total = numbers.randint(ranks, 9)
        seconds = [numbers.uniform(0.1, 1) for _ in range(ranks)]
        most = [numbers.choice((math.inf, numbers.randint(total // ranks + 1, total)))] * ranks

        shares = fitting_shares(total, seconds, most)

        assert sum(shares) == total
        assert busy_seconds(shares, seconds) == best_by_trying(total, seconds, most)


def test_what_a_rank_cannot_take_goes_to_the_others():
    assert fitting_shares(12, (1, 2), (7, math.inf)) == (7, 5)


@pytest.mark.parametrize("most", [(1, 1), (5, 0)])
def test_a_batch_that_does_not_fit_is_refused(most):
    with pytest.raises(ValueError, match="3 samples cannot be shared out to 2 ranks"):
        fitting_shares(3, (1, 1), most)


def test_every_rank_has_a_sample():
    with pytest.raises(ValueError, match="cannot be shared out"):
        fitting_shares(2, (1, 1, 1))


def test_the_gain_is_by_how_much_faster():
    assert gain((6, 6), (8, 4), (1, 2)) == pytest.approx(0.5)


def test_shares_of_a_smaller_batch_are_in_proportion():
    assert resized((8, 4), 6) == (4, 2)
    assert resized((8, 4), 12) == (8, 4)
    assert resized((8, 4), 2) == (1, 1)


def test_a_small_gain_is_no_reason_to_change():
    assert better_shares((50, 50), (1, 1.04), FREE) is None
    assert better_shares((50, 50), (1, 1.2), FREE) == (55, 45)


def test_shares_beyond_what_a_rank_can_take_are_left_at_once():
    assert better_shares((6, 6), (1, 1), (5, math.inf)) == (5, 7)


def test_limits_that_hold_no_batch_change_nothing():
    assert better_shares((6, 6), (1, 9), (5, 5)) is None


def test_a_schedule_begins_evenly_and_changes_at_an_index():
    schedule = ShareSchedule(12, 2)

    schedule.change(3, (8, 4))
    schedule.change(5, (7, 5))

    assert [schedule.shares_at(index)[0] for index in range(7)] == [6, 6, 6, 8, 8, 7, 7]
    assert schedule.latest == (7, 5)


def test_a_batch_that_was_asked_for_keeps_its_shares():
    schedule = ShareSchedule(12, 2)
    schedule.shares_at(4)

    with pytest.raises(ValueError, match="shares can change from batch 5 on"):
        schedule.change(4, (8, 4))


def test_a_later_decision_takes_the_place_of_one_that_does_not_hold_yet():
    schedule = ShareSchedule(12, 2)

    schedule.change(9, (8, 4))
    schedule.change(7, (7, 5))

    assert [schedule.shares_at(index)[0] for index in (6, 7, 9)] == [6, 7, 7]


@pytest.mark.parametrize("shares", [(8, 5), (12, 0), (4, 4, 4)])
def test_what_are_no_shares_of_the_batch_is_refused(shares):
    with pytest.raises(ValueError, match="no shares of 12 samples for 2 ranks"):
        ShareSchedule(12, 2).change(1, shares)


def test_a_schedule_that_was_saved_says_the_same():
    saved = ShareSchedule(12, 2)
    saved.change(3, (8, 4))
    saved.change(6, (7, 5))
    restored = ShareSchedule(12, 2)

    assert restored.load_state_dict(saved.state_dict())

    assert [restored.shares_at(i) for i in range(9)] == [saved.shares_at(i) for i in range(9)]


@pytest.mark.parametrize("other", [(12, 3), (16, 2)])
def test_a_schedule_of_other_ranks_or_batches_is_left_aside(other):
    saved = ShareSchedule(*other)
    schedule = ShareSchedule(12, 2)

    assert not schedule.load_state_dict(saved.state_dict())
    assert schedule.shares_at(0) == (6, 6)


def test_a_schedule_does_not_grow_without_end():
    schedule = ShareSchedule(12, 2)

    for index in range(1000):
        schedule.change(index, (5 + index % 2, 7 - index % 2))

    assert len(schedule.state_dict()["changes"]) == MAX_CHANGES
    assert schedule.shares_at(999) == (6, 6)


def test_busy_time_is_the_median_of_a_sample():
    busy = BusyTime(collectives_inside=False)
    for step, seconds in enumerate((0.4, 0.4, 9.0)):
        busy.add(step, 4, seconds)

    assert busy.take() == pytest.approx(0.1)
    assert busy.take() is None


def test_busy_time_leaves_out_what_collectives_blocked_once_that_is_known():
    busy = BusyTime(collectives_inside=True)
    for step in (1, 2, 3):
        busy.add(step, 2, 1.0)
    assert busy.take() is None

    busy.blocked(1, 0.6)
    busy.blocked(2, 0.6)
    assert busy.take() == pytest.approx(0.2)

    busy.blocked(3, 0.8)
    assert busy.take() == pytest.approx(0.1)


class Meeting:
    """Gathers the numbers of ranks that are threads."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=20)
        self.told: list[list[float]] = [[]] * num_ranks

    def gather(self, rank: int, values: Sequence[float]) -> np.ndarray:
        self.told[rank] = list(values)
        self.barrier.wait()
        everybody = np.array(self.told)
        self.barrier.wait()
        return everybody


def balanced(
    speeds: Callable[[int], Sequence[float]],
    *,
    windows: int,
    batch: int = 12,
    ahead: Sequence[int] = (0, 0),
    most: Sequence[float] = FREE,
    overhead: Callable[[tuple[int, ...]], float] = lambda shares: 0.0,
) -> list[tuple[int, ...]]:
    """Let ranks run windows whose seconds per sample `speeds` tells; return the shares of each."""
    meeting = Meeting(len(ahead))

    def run(rank: int) -> list[tuple[int, ...]]:
        schedule = ShareSchedule(batch, len(ahead))
        gather = partial(meeting.gather, rank)
        balancer = Balancer(schedule, gather, BusyTime(collectives_inside=False))
        seen = []
        for index in range(windows):
            schedule.shares_at(index + ahead[rank])
            seen.append(schedule.shares_at(index))
            busy = [share * each for share, each in zip(seen[-1], speeds(index), strict=True)]
            balancer.window_ended(
                EndedWindow(
                    index=index,
                    step=index,
                    num_samples=seen[-1][rank],
                    passes_seconds=busy[rank],
                    seconds=max(busy) + overhead(seen[-1]),
                    most_samples=most[rank],
                )
            )
        return seen

    with ThreadPoolExecutor(len(ahead)) as threads:
        first, *others = threads.map(run, range(len(ahead)))
    assert all(other == first for other in others), "the ranks disagree"
    return first


def test_ranks_that_differ_in_speed_come_to_end_together():
    shares = balanced(lambda index: (0.1, 0.2), windows=20)

    assert shares[:8] == [(6, 6)] * 8
    assert shares[8:] == [(8, 4)] * 12


def test_equal_ranks_keep_even_shares():
    shares = balanced(lambda index: (0.1, 0.103), windows=40, batch=64)

    assert set(shares) == {(32, 32)}


def test_a_change_comes_behind_what_any_rank_has_loaded_ahead():
    shares = balanced(lambda index: (0.1, 0.2), windows=24, ahead=(0, 5))

    assert shares[:13] == [(6, 6)] * 13  # decided after batch 7, when rank 1 had loaded batch 12
    assert shares[13:] == [(8, 4)] * 11


def test_shares_follow_a_rank_that_becomes_fast_again():
    shares = balanced(lambda index: (0.1, 0.2 if index < 20 else 0.1), windows=60)

    assert (shares[19], shares[-1]) == ((8, 4), (6, 6))


def test_a_rank_takes_no_more_than_its_memory_holds():
    shares = balanced(lambda index: (0.1, 0.2), windows=20, most=(7, math.inf))

    assert shares[-1] == (7, 5)


def test_shares_that_make_windows_no_faster_are_taken_back():
    """As where larger shares take one micro-batch more, each with its price in communication."""
    shares = balanced(
        lambda index: (0.1, 0.2),
        windows=200,
        overhead=lambda shares: 0.0 if shares[0] == 6 else 0.6,
    )

    assert shares[8:24] == [(8, 4)] * 8 + [(6, 6)] * 8
    assert shares[24:136] == [(6, 6)] * 112  # it rests before it tries again
    assert (8, 4) in shares[136:]


def test_shares_that_help_stay_although_there_is_a_price():
    shares = balanced(
        lambda index: (0.1, 0.2), windows=80, overhead=lambda shares: 0.0 if shares[0] == 6 else 0.2
    )

    assert set(shares[8:]) == {(8, 4)}


def window(step: int, num_samples: int, passes_seconds: float) -> EndedWindow:
    return EndedWindow(
        index=step,
        step=step,
        num_samples=num_samples,
        passes_seconds=passes_seconds,
        seconds=passes_seconds,
    )


def test_nobody_changes_while_a_rank_has_measured_nothing():
    schedule = ShareSchedule(12, 2)
    told = np.array([[0.1, 8, math.inf, 1], [math.nan, 8, math.inf, 1]])
    balancer = Balancer(schedule, lambda values: told, BusyTime(collectives_inside=True))

    for step in range(8):
        assert balancer.window_ended(window(step, 6, 0.6)) is None

    assert schedule.latest == (6, 6)


def test_the_first_windows_are_not_measured():
    measured = []

    def gather(values: Sequence[float]) -> np.ndarray:
        measured.append(values[0])
        return np.array([values])

    balancer = Balancer(ShareSchedule(4, 1), gather, BusyTime(collectives_inside=False))
    for step in range(8):
        balancer.window_ended(window(step, 4, 99.0 if step < WARM_UP_WINDOWS else 1.0))

    assert measured == [0.25]


def test_a_balancer_that_was_saved_goes_on():
    told = np.array([[0.1, 8, math.inf, 1], [0.2, 8, math.inf, 1]])

    def new_balancer() -> Balancer:
        return Balancer(
            ShareSchedule(12, 2), lambda values: told, BusyTime(collectives_inside=False)
        )

    saved = new_balancer()
    for step in range(8):
        saved.window_ended(window(step, 6, 0.6))
    restored = new_balancer()
    restored.load_state_dict(saved.state_dict())

    assert restored.schedule.shares_at(8) == (8, 4)
    assert restored.state_dict() == saved.state_dict()


def test_even_shares_add_up():
    assert even_shares(8, 3) == (3, 3, 2)


def two_ranks(told: Sequence[float]) -> tuple[Balancer, list[int]]:
    """A balancer whose rank measured 0.1, and whose peer tells the given; and what was gathered."""
    calls: list[int] = []

    def gather(values: Sequence[float]) -> np.ndarray:
        calls.append(len(values))
        return np.array([values, told[-len(values) :]])

    return Balancer(ShareSchedule(12, 2), gather, BusyTime(collectives_inside=False)), calls


def test_beginning_to_balance_shares_by_what_was_measured_behind_what_is_loaded():
    balancer, calls = two_ranks([0.2, 5])
    for step in range(20):
        balancer.measure(window(step, 6, 0.6))
    assert not calls

    assert balancer.begin() == (8, 4)
    assert [balancer.schedule.shares_at(index)[0] for index in (4, 5)] == [6, 8]


def test_ending_to_balance_goes_back_to_even_shares_once():
    balancer, calls = two_ranks([0.2, 5])
    for step in range(20):
        balancer.measure(window(step, 6, 0.6))
    balancer.begin()
    balancer.schedule.shares_at(8)

    assert balancer.end() == (6, 6)
    assert [balancer.schedule.shares_at(index)[0] for index in (8, 9)] == [8, 6]
    num_calls = len(calls)
    assert balancer.end() is None
    assert len(calls) == num_calls


def test_beginning_before_anything_is_known_leaves_shares_even():
    balancer, _ = two_ranks([math.nan, 0])

    assert balancer.begin() is None
    assert balancer.schedule.latest == (6, 6)


def test_busy_time_of_long_ago_does_not_count():
    busy = BusyTime(collectives_inside=False)
    for step in range(200):
        busy.add(step, 1, 0.1 if step < 160 else 0.4)

    assert busy.take() == pytest.approx(0.4)


class Counting:
    """Stands in for an optimizer; notes the rate of each update."""

    def __init__(self) -> None:
        self.param_groups, self.rates = [{"lr": 0.1}], []

    def step(self) -> None:
        self.rates.append(self.param_groups[0]["lr"])


class AdamLike(Counting):
    pass


class LikeSGD(Counting):
    pass


class Lion(Counting):
    pass


@pytest.mark.parametrize(("kind", "factor"), [(AdamLike, 2.0), (LikeSGD, 4.0)])
def test_the_rate_goes_with_the_batch_for_the_time_of_an_update(kind, factor):
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


def test_of_some_optimizers_nobody_knows_how_the_rate_goes():
    assert scaling_exponent(Lion()) is None
