"""Tests that calls of evaluations are passed on before the next step ends, and only once."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from fakes.cuda_streams import DeviceTensor, FakeCuda
from fakes.sleeping_collectives import (
    ManualClock,
    SleepingCollectives,
    add_up,
    instrumentation_over,
)

from zerowatch.runtime.collectives.call_batch import CallBatch
from zerowatch.runtime.collectives.totals import StepCommTotals
from zerowatch.runtime.common.phase_timer import BACKWARD, EVAL, FORWARD, OTHER, PhaseTimer


class Rank:
    """A rank whose collectives run on the host or on a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, on_device: bool) -> None:
        self.clock = ManualClock()
        self.cuda = FakeCuda(self.clock)
        self.tensor_class = DeviceTensor if on_device else torch.Tensor
        if on_device:
            self.cuda.patch(monkeypatch)
        all_reduce = (self.cuda if on_device else SleepingCollectives(self.clock)).all_reduce
        self.instrumentation = instrumentation_over(
            monkeypatch, all_reduce, self.clock, "nccl" if on_device else "gloo"
        )
        self.phases = PhaseTimer(self.clock)
        self.batches: list[CallBatch] = []
        self.calls = self.instrumentation.call_recorder
        self.calls.connect(self.phases, self.batches.append)

    def reduce(self, milliseconds: float, **options: object) -> dist.Work | None:
        return dist.all_reduce(
            torch.tensor([milliseconds]).as_subclass(self.tensor_class), **options
        )

    def evaluate(self, milliseconds: float) -> None:
        self.phases.enter(EVAL)
        self.reduce(milliseconds)
        self.phases.leave()

    def totals(self) -> list[StepCommTotals]:
        self.clock.elapse(1000)
        return add_up(self.batches, self.instrumentation)


@pytest.fixture(params=[False, True], ids=["host", "device"])
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    made = Rank(monkeypatch, on_device=request.param)
    yield made
    made.instrumentation.close()


def test_calls_of_an_evaluation_are_passed_on_while_it_lasts(rank: Rank) -> None:
    rank.phases.enter(EVAL)
    rank.reduce(10)
    rank.reduce(5)

    rank.calls.pass_on_between_steps()

    (evaluation,) = rank.totals()
    assert evaluation.totals()["all_reduce"].calls == 2
    assert evaluation.seconds == pytest.approx(0.015)


def test_calls_that_block_training_wait_for_the_end_of_the_next_step(rank: Rank) -> None:
    rank.reduce(10)
    rank.calls.pass_on_between_steps()
    before = list(rank.batches)
    rank.batches.append(rank.calls.drain())

    (step,) = rank.totals()

    assert before == []
    assert step.exposed_seconds == pytest.approx(0.010)


def test_calls_around_those_of_an_evaluation_are_passed_on_with_them_in_order(rank: Rank) -> None:
    for milliseconds in (10, 5):
        rank.reduce(milliseconds)
        rank.evaluate(milliseconds)
    rank.reduce(20)

    rank.calls.pass_on_between_steps()
    rank.phases.drain()
    rank.reduce(40)
    rank.calls.pass_on_between_steps()
    rank.batches.append(rank.calls.drain())

    between, step = rank.batches
    assert [call.phase for call in between.calls] == [OTHER, EVAL, OTHER, EVAL, OTHER]
    assert [call.phase for call in step.calls] == [OTHER]
    assert [each.seconds for each in rank.totals()] == [pytest.approx(0.050), pytest.approx(0.040)]


def test_each_call_is_passed_on_once(rank: Rank) -> None:
    rank.evaluate(10)
    rank.calls.pass_on_between_steps()
    rank.calls.pass_on_between_steps()
    rank.reduce(20)
    rank.batches.append(rank.calls.drain())

    first, second = rank.totals()

    assert (first.seconds, second.seconds) == (pytest.approx(0.010), pytest.approx(0.020))


@pytest.mark.parametrize("phase", [FORWARD, BACKWARD])
def test_calls_of_a_step_wait_for_its_end(rank: Rank, phase: int) -> None:
    rank.phases.enter(phase)
    rank.reduce(10)
    rank.calls.pass_on_between_steps()
    rank.clock.elapse(1)
    rank.phases.leave()

    rank.calls.pass_on_between_steps()

    assert rank.batches == []


def test_the_first_step_after_an_evaluation_is_a_step(rank: Rank) -> None:
    rank.phases.enter(FORWARD)
    rank.clock.elapse(1)
    rank.phases.leave()
    rank.phases.drain()
    rank.evaluate(10)

    rank.calls.pass_on_between_steps()

    assert len(rank.batches) == 1


def test_a_call_whose_handle_was_dropped_is_passed_on(rank: Rank) -> None:
    rank.calls.is_sampled = False
    rank.phases.enter(EVAL)
    rank.reduce(10, async_op=True)
    rank.clock.elapse(20)
    rank.phases.leave()

    rank.calls.pass_on_between_steps()

    (between,) = rank.totals()
    assert between.totals()["all_reduce"].calls == 1


def test_no_event_is_recorded_by_passing_on(rank: Rank) -> None:
    rank.evaluate(10)
    before = rank.cuda.num_records

    rank.calls.pass_on_between_steps()

    assert rank.cuda.num_records == before


def test_a_step_that_ends_meanwhile_waits_until_they_are_passed_on(rank: Rank) -> None:
    drained: list[CallBatch] = []
    step = threading.Thread(target=lambda: drained.append(rank.calls.drain()))
    waited: list[bool] = []

    def pass_on(batch: CallBatch) -> None:
        step.start()
        step.join(0.05)
        waited.append(step.is_alive() and not drained)
        rank.batches.append(batch)

    rank.calls.connect(rank.phases, pass_on)
    rank.evaluate(10)
    rank.calls.pass_on_between_steps()
    step.join()
    rank.reduce(5)

    assert waited == [True]
    assert [len(batch.calls) for batch in (*rank.batches, *drained)] == [1, 0]
    assert len(rank.calls.drain().calls) == 1  # a later step waits no longer


def test_an_event_that_is_the_anchor_is_released_last(rank: Rank) -> None:
    rank.evaluate(10)
    rank.calls.pass_on_between_steps()
    rank.totals()
    needed = rank.cuda.num_events
    rank.batches.clear()

    for _ in range(3):
        rank.evaluate(10)
        rank.calls.pass_on_between_steps()
        rank.totals()
        rank.batches.clear()

    assert rank.cuda.num_events == needed
