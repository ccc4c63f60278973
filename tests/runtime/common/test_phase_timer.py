"""Tests of `PhaseTimer`: time by phase, by a fake clock."""

from __future__ import annotations

import pytest

from zerowatch.metrics.catalog.labels import PHASES
from zerowatch.runtime.common.phase_timer import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVAL,
    FORWARD,
    GENERATE,
    OPTIMIZER,
    OTHER,
    UNCOUNTED,
    PhaseTimer,
)


class HandTurned:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


def test_the_constants_are_the_indices_of_the_labels() -> None:
    names = ("data", "forward", "backward", "optimizer", "eval", "checkpoint", "other")

    places = (DATA, FORWARD, BACKWARD, OPTIMIZER, EVAL, CHECKPOINT, OTHER)

    assert tuple(PHASES[place] for place in places) == names


def test_time_is_attributed_to_the_innermost_phase() -> None:
    time = HandTurned()
    timer = PhaseTimer(time)

    time.ns = 5  # before the first phase no time counts
    timer.enter(FORWARD)
    time.ns = 12
    timer.enter(DATA)
    time.ns = 15
    timer.leave()
    time.ns = 16
    timer.leave()
    time.ns = 20
    totals = timer.drain()

    assert totals[FORWARD] == 7 + 1
    assert totals[DATA] == 3
    assert totals[OTHER] == 4
    assert sum(totals) == 20 - 5


def test_take_restarts_the_totals_within_the_current_phase() -> None:
    time = HandTurned()
    timer = PhaseTimer(time)
    timer.enter(BACKWARD)

    time.ns = 10
    first = timer.drain()
    time.ns = 14
    second = timer.drain()

    assert (first[BACKWARD], second[BACKWARD]) == (10, 4)
    assert timer.current == BACKWARD


def test_forward_passes_are_without_training_until_a_backward_begins():
    clock = iter(range(0, 1000, 10))
    timer = PhaseTimer(now_ns=lambda: next(clock))
    seen = [timer.forward_only_ns()]

    for phase in (FORWARD, EVAL):
        timer.enter(phase)
        timer.leave()
        seen.append(timer.forward_only_ns())
    timer.enter(BACKWARD)
    seen.append(timer.forward_only_ns())
    timer.leave()
    seen.append(timer.forward_only_ns())

    assert seen == [0, 10, 20, 0, 0]


def test_time_in_which_the_clock_is_stopped_belongs_to_no_step() -> None:
    time = HandTurned()
    timer = PhaseTimer(time)
    timer.record_intervals()
    ended: list[int] = []
    timer.on_interval_end = ended.append

    timer.enter(FORWARD)
    time.ns = 10
    timer.leave()
    timer.drain()  # the end of a step
    time.ns = 30
    timer.stop()  # no pass of the next step has begun: these 20 are not part of it
    stopped = timer.is_stopped
    time.ns = 1000
    timer.enter(FORWARD)
    time.ns = 1003
    timer.leave()
    time.ns = 1005
    timer.stop()  # within a step
    time.ns = 2000
    timer.enter(BACKWARD)
    time.ns = 2004
    timer.leave()
    totals = timer.drain()

    assert stopped and not timer.is_stopped
    assert (totals[FORWARD], totals[BACKWARD], totals[OTHER]) == (3, 4, 2)
    assert sum(totals) == 9
    assert sum(end - start for _, start, end in timer.drain_intervals()) == 10 + 9
    assert ended.count(UNCOUNTED) == 3


def test_time_in_a_phase_counts_until_the_clock_is_stopped() -> None:
    time = HandTurned()
    timer = PhaseTimer(time)
    timer.enter(CHECKPOINT)

    time.ns = 5
    timer.stop()
    time.ns = 50
    timer.leave()

    assert timer.drain()[CHECKPOINT] == 5


def test_idle_seconds_are_those_since_the_last_change_of_phase() -> None:
    time = HandTurned()
    timer = PhaseTimer(time)
    time.ns = 2_000_000_000
    timer.enter(FORWARD)

    time.ns = 3_500_000_000

    assert timer.idle_seconds() == 1.5


def test_a_replay_is_activity_without_a_change_of_phase() -> None:
    time = HandTurned()
    timer = PhaseTimer(time)
    time.ns = 2_000_000_000
    timer.mark_replay()
    time.ns = 3_500_000_000
    after_replay = timer.idle_seconds(), timer.activity_ns

    timer.enter(FORWARD)

    assert after_replay == (1.5, 2_000_000_000)
    assert (timer.idle_seconds(), timer.activity_ns) == (0.0, 3_500_000_000)
    assert timer.drain()[OTHER] == 0


def test_intervals_are_kept_in_order_once_they_are_recorded() -> None:
    time = HandTurned()
    timer = PhaseTimer(time)
    timer.enter(FORWARD)
    time.ns = 3
    before = list(timer.drain_intervals())
    timer.record_intervals()

    timer.leave()
    time.ns = 8
    timer.enter(BACKWARD)
    time.ns = 19
    timer.leave()

    assert before == []
    assert list(timer.drain_intervals()) == [(FORWARD, 0, 3), (OTHER, 3, 8), (BACKWARD, 8, 19)]
    assert list(timer.drain_intervals()) == []


def test_of_very_many_intervals_the_last_4096_are_kept() -> None:
    time = HandTurned()
    timer = PhaseTimer(time)
    timer.record_intervals()
    for number in range(5000):
        time.ns = number
        timer.enter(FORWARD)

    kept = list(timer.drain_intervals())

    assert (len(kept), kept[0], kept[-1]) == (
        4096,
        (FORWARD, 5000 - 4097, 5000 - 4096),
        (FORWARD, 4998, 4999),
    )


def test_the_listeners_hear_the_phase_that_ends() -> None:
    timer = PhaseTimer(HandTurned())
    changes: list[int] = []
    ends: list[int] = []
    timer.on_change, timer.on_interval_end = changes.append, ends.append

    timer.enter(DATA)
    timer.enter(EVAL)
    timer.leave()
    timer.stop()
    timer.leave()

    assert changes == [OTHER, DATA, EVAL, DATA, DATA]
    assert ends == [OTHER, DATA, EVAL, DATA, UNCOUNTED]


@pytest.mark.parametrize(
    ("phase", "leaves"),
    [(FORWARD, False), (DATA, False), (GENERATE, False), (EVAL, True), (CHECKPOINT, True)],
)
def test_training_is_left_by_an_evaluation_or_a_checkpoint(phase: int, leaves: bool) -> None:
    timer = PhaseTimer(HandTurned())

    timer.enter(phase)

    assert timer.left_training is leaves


@pytest.mark.parametrize(
    ("phase", "passes_ns", "begun"),
    [(FORWARD, 7, True), (BACKWARD, 7, True), (OPTIMIZER, 0, False), (EVAL, 0, False)],
)
def test_a_step_has_begun_once_a_pass_has(phase: int, passes_ns: int, begun: bool) -> None:
    time = HandTurned()
    timer = PhaseTimer(time)
    before = timer.is_between_steps()

    timer.enter(phase)
    within = timer.is_between_steps()
    time.ns = 7
    timer.leave()

    assert (before, within) == (True, phase == EVAL)
    assert timer.passes_ns() == passes_ns
    assert timer.is_between_steps() is not begun
    timer.drain()
    assert timer.is_between_steps()
