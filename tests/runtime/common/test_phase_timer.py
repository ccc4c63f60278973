"""Tests of `PhaseTimer`: time by phase, by a fake clock."""

from __future__ import annotations

from zerowatch.metrics.catalog.labels import PHASES
from zerowatch.runtime.common.phase_timer import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVAL,
    FORWARD,
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
