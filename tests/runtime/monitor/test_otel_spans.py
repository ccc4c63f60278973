"""Tests of traced steps: which are sampled or slow, their ids, and their spans."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fakes.clock import FakeClock
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

from zerowatch.metrics.catalog.labels import OPS
from zerowatch.runtime.collectives.groups import CollectiveCall
from zerowatch.runtime.common.phase_timer import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVAL,
    FORWARD,
    GENERATE,
    OPTIMIZER,
    OTHER,
    PhaseTimer,
)
from zerowatch.runtime.common.step_errors import StepError
from zerowatch.runtime.monitor.otel_spans import (
    LEAST_STEPS,
    MAX_CHILDREN,
    SLOW_AT_ONCE,
    SlowSteps,
    child_spans,
    exception_events,
    is_sampled,
    span_id_of,
    trace_id_of,
)

MS = 1_000_000
ALL_REDUCE, ALL_GATHER = OPS.index("all_reduce"), OPS.index("all_gather")


def call(start_ms, end_ms, op=ALL_REDUCE, *, payload=8, role="dp", timed=True):
    made = CollectiveCall(op, SimpleNamespace(role=role), payload, None, BACKWARD)
    made.start_ns, made.end_ns, made.timed = int(start_ms * MS), int(end_ms * MS), timed
    made.exposed_ns = made.end_ns - made.start_ns
    return made


def interval(phase, start_ms, end_ms):
    return phase, int(start_ms * MS), int(end_ms * MS)


ONE_OF_EACH = [
    interval(DATA, 0, 2),
    interval(OTHER, 2, 3),
    interval(FORWARD, 3, 5),
    interval(BACKWARD, 5, 9),
    interval(OPTIMIZER, 9, 10),
    interval(CHECKPOINT, 10, 11),
    interval(EVAL, 11, 12),
    interval(GENERATE, 12, 14),
]


def shown(spans):
    return [(span.name, span.start_ns / MS, span.end_ns / MS) for span in spans]


def test_each_phase_and_each_collective_has_a_span():
    spans = child_spans(ONE_OF_EACH, [call(6, 7), call(9.2, 9.8, ALL_GATHER)], 0, 0)

    assert shown(spans) == [
        ("data.wait", 0, 2),
        ("forward", 3, 5),
        ("backward", 5, 9),
        ("comm all_reduce", 6, 7),
        ("optimizer", 9, 10),
        ("comm all_gather", 9.2, 9.8),
        ("checkpoint", 10, 11),
        ("eval", 11, 12),
        ("generate", 12, 14),
    ]


def test_phases_and_calls_may_use_different_clocks():
    on_device = call(-3, -2)
    on_device.start_event = object()
    by_host = call(2.5, 3, ALL_GATHER)  # of a gloo group, say, next to the GPU's

    spans = child_spans([interval(FORWARD, 0, 4)], [on_device, by_host], 100 * MS, 104 * MS)

    assert shown(spans) == [
        ("forward", 100, 104),
        ("comm all_reduce", 101, 102),
        ("comm all_gather", 102.5, 103),
    ]


def test_short_gaps_within_a_phase_do_not_split_its_span():
    spans = child_spans([interval(FORWARD, 0, 1), interval(FORWARD, 1.01, 2)], [], 0, 0)

    [span] = spans
    assert (span.start_ns, span.end_ns) == (0, 2 * MS)
    assert span.attributes == {"zerowatch.pieces": 2, "zerowatch.busy_seconds": 0.00199}


def test_of_many_micro_batches_each_phase_is_one_span():
    phases = [
        interval(phase, 3 * number + phase, 3 * number + phase + 1)
        for number in range(64)
        for phase in (DATA, FORWARD, BACKWARD)
    ]

    spans = child_spans(phases, [], 0, 0)

    assert [span.name for span in spans] == ["data.wait", "forward", "backward"]
    assert {span.attributes["zerowatch.pieces"] for span in spans} == {64}
    assert spans[1].attributes["zerowatch.busy_seconds"] == pytest.approx(0.064)


def test_of_many_calls_the_longest_have_spans_and_the_rest_one_for_each_operation():
    calls = [call(number, number + 0.01 * (number + 1)) for number in range(40)]
    calls += [call(50, 50.001, ALL_GATHER), call(51, 51.001, ALL_GATHER, role="world")]

    spans = child_spans(ONE_OF_EACH, calls, 0, 0)

    comms = [span for span in spans if span.name.startswith("comm")]
    single = [span for span in comms if "zerowatch.pieces" not in span.attributes]
    merged = {span.name: span.attributes for span in comms if "zerowatch.pieces" in span.attributes}
    assert len(spans) == MAX_CHILDREN
    assert sorted(span.start_ns // MS for span in single) == list(range(40 - len(single), 40))
    assert merged["comm all_reduce"]["zerowatch.pieces"] == 40 - len(single)
    assert merged["comm all_reduce"]["zerowatch.group"] == "dp"
    assert merged["comm all_gather"]["zerowatch.payload_bytes"] == 16
    assert "zerowatch.group" not in merged["comm all_gather"]


def test_there_are_never_more_than_twenty_spans():
    calls = [call(n, n + 1, op) for n in range(50) for op in range(len(OPS))]
    eight_stretches = [interval(n % 2 + 1, n, n + 1) for n in range(8)]

    assert len(child_spans(eight_stretches, calls, 0, 0)) <= MAX_CHILDREN


def test_calls_whose_times_are_not_known_have_no_span():
    assert child_spans([], [call(1, 0, timed=False)], 0, 0) == []


def test_the_timer_records_the_intervals_of_each_phase():
    times = iter([0, 0, 10, 25, 40, 60])
    timer = PhaseTimer(lambda: next(times))
    timer.record_intervals()

    timer.enter(FORWARD)
    timer.leave()
    timer.drain()

    assert list(timer.drain_intervals()) == [(OTHER, 0, 10), (FORWARD, 10, 25), (OTHER, 25, 40)]
    assert list(timer.drain_intervals()) == []


def test_a_timer_records_no_intervals_by_default():
    timer = PhaseTimer()
    timer.enter(FORWARD)
    timer.leave()

    assert list(timer.drain_intervals()) == []


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
    sampled = [
        step for step in range(20_000) if is_sampled(trace_id_of("a", step), 1 / every_steps)
    ]

    assert len(sampled) == pytest.approx(20_000 / every_steps, rel=0.2)


@pytest.mark.parametrize("ratio", [0, 1])
def test_no_step_or_every_step_is_sampled(ratio):
    assert {is_sampled(trace_id_of("a", step), ratio) for step in range(100)} == {ratio == 1}


@pytest.mark.parametrize("ratio", [0.01, 0.25, 1 / 3])
def test_the_sampler_of_the_sdk_makes_the_same_choice(ratio):
    sampler = TraceIdRatioBased(ratio)

    for step in range(1000):
        trace_id = trace_id_of("a", step)
        theirs = sampler.should_sample(None, trace_id, "train.step").decision.is_sampled()
        assert is_sampled(trace_id, ratio) == theirs


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


def test_a_gap_of_a_tenth_of_a_millisecond_splits_a_span():
    spans = child_spans(
        [interval(FORWARD, 0, 1), interval(FORWARD, 1.099, 2), interval(FORWARD, 2.1, 3)], [], 0, 0
    )

    assert shown(spans) == [("forward", 0, 2), ("forward", 2.1, 3)]


def test_a_call_has_its_operation_group_bytes_and_exposed_time():
    made = call(2, 9, ALL_GATHER, payload=24, role="tp")
    made.exposed_ns = 3 * MS

    [span] = child_spans([], [made], 0, 0)

    assert span.name == "comm all_gather"
    assert span.attributes == {
        "zerowatch.op": "all_gather",
        "zerowatch.group": "tp",
        "zerowatch.payload_bytes": 24,
        "zerowatch.exposed_seconds": 0.003,
    }


def test_a_trace_is_sampled_by_the_lower_half_of_its_id():
    half = 2**63

    assert is_sampled(half - 1, 0.5)
    assert not is_sampled(half, 0.5)
    assert is_sampled((7 << 64) + half - 1, 0.5)


def test_an_error_that_is_seen_twice_is_one_event():
    errors = [
        StepError(kind=kind, unix_ns=number, type_name=name, message="m")
        for number, (kind, name) in enumerate(
            [("out_of_memory", "A"), ("hang", "B"), ("run_failed", "A")]
        )
    ]

    first, second = exception_events(errors)

    assert (first.name, first.unix_ns) == ("exception", 2)
    assert first.attributes == {
        "exception.type": "A",
        "exception.message": "m",
        "zerowatch.error": "run_failed",
    }
    assert (second.unix_ns, second.attributes["zerowatch.error"]) == (1, "hang")


@pytest.mark.parametrize(("seconds", "is_slow"), [(2.0, False), (2.01, True)])
def test_a_step_is_slow_beyond_twice_the_median(seconds, is_slow):
    assert slow_among([1.0] * LEAST_STEPS + [seconds]) == ([LEAST_STEPS] if is_slow else [])
