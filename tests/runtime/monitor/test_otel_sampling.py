"""Which steps are traced: sampled ones, the same on all ranks, and slow ones."""

from __future__ import annotations

import pytest
from fakes.clock import FakeClock

from zerowatch.runtime.monitor.otel_spans import (
    LEAST_STEPS,
    SLOW_AT_ONCE,
    SlowSteps,
    is_sampled,
    span_id_of,
    trace_id_of,
)


def test_ids_depend_on_run_and_step_and_a_span_on_its_rank_too():
    assert trace_id_of("night-7", 3) == trace_id_of("night-7", 3)
    assert len({trace_id_of(run, step) for run in ("a", "b") for step in range(100)}) == 200
    spans = {
        span_id_of("a", step, rank, attempt=attempt)
        for step in range(100)
        for rank in range(8)
        for attempt in ("0.0", "1.0")
    }
    assert len(spans) == 1600
    assert 0 < trace_id_of("a", 1) < 2**128
    assert 0 < span_id_of("a", 1, 0, attempt="0.0") < 2**64


@pytest.mark.parametrize("every_steps", [10, 100])
def test_about_one_in_every_steps_is_sampled(every_steps):
    sampled = [step for step in range(20_000) if is_sampled(trace_id_of("a", step), every_steps)]

    assert len(sampled) == pytest.approx(20_000 / every_steps, rel=0.2)


def test_every_step_is_sampled_with_every_steps_1():
    assert all(is_sampled(trace_id_of("a", step), 1) for step in range(100))


def slow_among(seconds):
    steps = SlowSteps(FakeClock())
    return [number for number, each in enumerate(seconds) if steps.is_slow(each)]


def test_a_step_is_slow_compared_with_the_median_of_earlier_ones():
    assert slow_among([1.0] * 20 + [1.9, 2.1, 1.0, 5.0]) == [21, 23]


def test_the_first_steps_are_never_slow():
    assert slow_among([1.0] * (LEAST_STEPS - 1) + [9.0]) == []


def test_steps_that_stay_slow_become_the_new_median():
    slow = slow_among([1.0] * 101 + [3.0] * 101)

    assert slow[0] == 101
    assert max(slow) < 101 + 60


def test_traces_of_many_slow_steps_are_limited():
    clock = FakeClock()
    steps = SlowSteps(clock)

    at_once = sum(steps.may_trace() for _ in range(100))
    clock.seconds += 11
    later = sum(steps.may_trace() for _ in range(100))

    assert (at_once, later) == (SLOW_AT_ONCE, 2)
