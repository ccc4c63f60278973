"""Tests of the time for which collectives block training on CPU, by a fake clock.

Covers `call_reader.py` and `call_recorder.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from fakes.sleeping_collectives import (
    MS,
    ManualClock,
    SleepingCollectives,
    add_up,
    instrumentation_over,
)

from zerowatch.metrics.catalog.labels import PHASES
from zerowatch.runtime.collectives.instrument import CollectiveInstrumentation
from zerowatch.runtime.collectives.totals import StepCommTotals
from zerowatch.runtime.common.phase_timer import BACKWARD, OPTIMIZER, PhaseTimer


class Rank:
    """A training thread that issues collectives, computes and waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self.collectives = SleepingCollectives(self.clock)
        self.instrumentation: CollectiveInstrumentation = instrumentation_over(
            monkeypatch, self.collectives.all_reduce, self.clock, "gloo"
        )
        self.phases = PhaseTimer(self.clock)
        self.instrumentation.call_recorder.connect(self.phases, None)
        self.batches = []

    def reduce(self, milliseconds: float, **options: object):
        return dist.all_reduce(torch.tensor([milliseconds]), **options)

    def begin(self, milliseconds: float):
        return self.reduce(milliseconds, async_op=True)

    def compute(self, milliseconds: float) -> None:
        self.clock.elapse(milliseconds)

    def end_step(self) -> None:
        self.batches.append(self.instrumentation.call_recorder.drain())

    def steps(self) -> list[StepCommTotals]:
        """Close the last step, let all of it end, and add each up."""
        self.end_step()
        self.clock.elapse(1000)
        return add_up(self.batches, self.instrumentation)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    made = Rank(monkeypatch)
    yield made
    made.instrumentation.close()


def synchronous(rank: Rank) -> None:
    rank.reduce(10)


def waited_for_at_once(rank: Rank) -> None:
    rank.begin(10).wait()


def waited_for_halfway(rank: Rank) -> None:
    work = rank.begin(10)
    rank.compute(4)
    work.wait()


def waited_for_when_done(rank: Rank) -> None:
    work = rank.begin(10)
    rank.compute(12)
    work.wait()


def waited_for_twice(rank: Rank) -> None:
    work = rank.begin(10)
    rank.compute(4)
    work.wait()
    rank.compute(3)
    work.wait()


def two_in_order(rank: Rank) -> None:
    first, second = rank.begin(10), rank.begin(20)
    rank.compute(4)
    first.wait()
    second.wait()


def two_in_the_other_order(rank: Rank) -> None:
    first, second = rank.begin(10), rank.begin(20)
    rank.compute(4)
    second.wait()
    first.wait()


def two_with_work_between(rank: Rank) -> None:
    first, second = rank.begin(10), rank.begin(20)
    first.wait()
    rank.compute(7)
    second.wait()


def never_waited_for(rank: Rank) -> None:
    rank.begin(10)
    rank.compute(5)


def hidden_behind_a_synchronous_call(rank: Rank) -> None:
    work = rank.begin(10)
    rank.reduce(6)
    work.wait()


@pytest.mark.parametrize(
    ("what", "exposed_ms", "comm_ms"),
    [
        (synchronous, 10, 10),
        (waited_for_at_once, 10, 10),
        (waited_for_halfway, 6, 10),
        (waited_for_when_done, 0, 10),
        (waited_for_twice, 6, 10),
        (two_in_order, 16, 20),
        (two_in_the_other_order, 16, 20),
        (two_with_work_between, 13, 20),
        (never_waited_for, 0, 10),
        (hidden_behind_a_synchronous_call, 10, 10),
    ],
)
def test_exposed_is_what_blocked_training(
    rank: Rank, what: Callable[[Rank], None], exposed_ms: float, comm_ms: float
) -> None:
    what(rank)

    (step,) = rank.steps()
    assert step.exposed_seconds == exposed_ms / 1000
    assert step.seconds == comm_ms / 1000


def test_an_issue_that_takes_long_is_exposed_too(rank: Rank) -> None:
    rank.collectives.issue_ms = 3

    waited_for_halfway(rank)

    (step,) = rank.steps()
    assert step.exposed_seconds == 0.006  # 3 at the issue, 4 hidden, 3 in the wait


def test_a_wait_in_the_next_step_belongs_to_the_step_of_the_call(rank: Rank) -> None:
    work = rank.begin(10)
    rank.end_step()
    rank.compute(4)
    work.wait()

    first, second = rank.steps()

    assert first.exposed_seconds == 0.006
    assert second.exposed_seconds == 0.0


def test_the_phase_of_the_wait_is_blocked_and_not_that_of_the_call(rank: Rank) -> None:
    rank.phases.enter(BACKWARD)
    rank.collectives.issue_ms = 1
    work = rank.begin(10)
    rank.phases.leave()
    rank.phases.enter(OPTIMIZER)
    rank.compute(2)
    work.wait()
    rank.phases.leave()

    (step,) = rank.steps()

    blocked = {PHASES[i]: ns / MS for i, ns in enumerate(step.blocked_ns) if ns}
    assert blocked == {"backward": 1, "optimizer": 7}


def test_another_threads_wait_does_not_block_training(rank: Rank) -> None:
    work = rank.begin(10)
    thread = threading.Thread(target=work.wait)
    thread.start()
    thread.join()

    (step,) = rank.steps()

    assert step.exposed_seconds == 0.0
    assert step.seconds == 0.010


def test_another_threads_call_does_not_block_training(rank: Rank) -> None:
    thread = threading.Thread(target=rank.reduce, args=(10,))
    thread.start()
    thread.join()

    (step,) = rank.steps()

    assert step.exposed_seconds == 0.0
    assert step.seconds == 0.010
