"""Tests of the metrics of steps: what counts as productive, and what is published in a stall."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from fakes.steps import step as record

from zerowatch.metrics.catalog import communication, generation, training
from zerowatch.metrics.catalog.labels import OPS, PHASES
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.step_record import GenerationTotals
from zerowatch.runtime.collectives.call_batch import CallBatch
from zerowatch.runtime.collectives.comm_time import CommTime
from zerowatch.runtime.collectives.groups import CollectiveCall
from zerowatch.runtime.collectives.totals import PeriodTotals
from zerowatch.runtime.instrumentation.raw_step import RawStep, StepCounts
from zerowatch.runtime.monitor.step_metrics import FinishedStep, StepMetrics

PLAIN_FIELDS = {"seconds", "phases", "loss", "samples"}  # of `fakes.steps.step`


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def metrics(recorder: Recorder) -> StepMetrics:
    return StepMetrics(recorder, lambda _: None, None)


def finished(
    *,
    discarded_seconds: float = 0.0,
    skipped: bool = False,
    coverage: float | None = None,
    trace: Mapping[str, str] | None = None,
    **fields: Any,
) -> FinishedStep:
    known = {"coverage": coverage, "trace": trace}
    raw = RawStep(
        step=1,
        ended_at=0.0,
        phase_ns=[],
        intervals=(),
        counts=StepCounts(discarded_ns=int(discarded_seconds * 1e9)),
        gradient_norm=None,
        learning_rate=None,
        loss_scale=None,
        memory=None,
        batch=CallBatch([]),
        **known,
    )
    made = {name: fields.pop(name) for name in list(fields) if name not in PLAIN_FIELDS}
    return FinishedStep(replace(record(1, **fields), skipped=skipped, **made), raw)


def test_skipped_updates_discarded_passes_and_evaluation_are_not_productive(
    recorder: Recorder, metrics: StepMetrics
) -> None:
    steps = [
        finished(seconds=2.0),
        finished(seconds=2.0, skipped=True),
        finished(seconds=2.0, discarded_seconds=0.5),
        finished(seconds=2.0, phases={"forward": 1.0, "eval": 0.75, "checkpoint": 0.25}),
    ]

    metrics.publish(steps, PeriodTotals())

    productive = recorder.snapshot().value(training.PRODUCTIVE_SECONDS)
    assert productive == pytest.approx(2.0 + 1.5 + 1.0)


def test_quantiles_are_published_again_while_training_stalls(
    recorder: Recorder, metrics: StepMetrics
) -> None:
    metrics.publish([], PeriodTotals())
    before = recorder.snapshot().values.get(training.STEP_DURATION_QUANTILE)
    metrics.publish([finished(seconds=0.5)], PeriodTotals())
    recorder.remove(training.STEP_DURATION_QUANTILE, "0.5")

    metrics.publish([], PeriodTotals())

    assert before is None
    assert recorder.snapshot().value(training.STEP_DURATION_QUANTILE, "0.5") == 0.5


def generated(tokens: int | None, **fields: Any) -> FinishedStep:
    """Return a step of 10 s that generated for 8 s, and waited for collectives for 5 s of them."""
    step = finished(seconds=10.0, phases={"backward": 2.0, "generate": 8.0}, **fields)
    totals = GenerationTotals(
        calls=2,
        sequences=None if tokens is None else 4,
        tokens=tokens,
        seconds=8.0,
        collectives=0,
        gathers=0,
        gathered_bytes=0,
        peak_bytes={},
    )
    waits = {"backward": 1.0, "generate": 5.0}
    record = replace(step.record, generation=totals, comm_exposed_phase_seconds=waits)
    return replace(step, record=record)


def test_generation_is_counted_with_the_step_that_follows(
    recorder: Recorder, metrics: StepMetrics
) -> None:
    metrics.publish([generated(30), finished(seconds=2.0), generated(50)], PeriodTotals())

    snapshot = recorder.snapshot()
    counted = [snapshot.value(spec) for spec in generation.METRICS]
    assert counted == [4, 8, 80, 10.0]
    assert snapshot.value(training.PHASE_SECONDS, "generate") == 16.0
    assert snapshot.value(training.PRODUCTIVE_SECONDS) == pytest.approx(22.0)


def test_tokens_that_are_unknown_are_not_counted(recorder: Recorder, metrics: StepMetrics) -> None:
    metrics.publish([generated(30), generated(None)], PeriodTotals())

    snapshot = recorder.snapshot()
    assert snapshot.value(generation.GENERATE_CALLS) == 4
    assert snapshot.value(generation.GENERATED_TOKENS) == 30


def test_a_step_that_generates_nothing_has_no_series_of_generation(
    recorder: Recorder, metrics: StepMetrics
) -> None:
    metrics.publish([finished(seconds=2.0)], PeriodTotals())

    assert generation.GENERATE_CALLS not in recorder.snapshot().values


def test_the_flops_of_a_step_are_divided_by_its_time_without_generation(
    recorder: Recorder,
) -> None:
    StepMetrics(recorder, lambda _: 6e12, 10e12).publish([generated(30)], PeriodTotals())

    assert recorder.snapshot().value(training.MFU) == pytest.approx(6e12 / 2.0 / 10e12)


def test_steps_are_counted_with_their_samples_and_phases(
    recorder: Recorder, metrics: StepMetrics
) -> None:
    steps = [
        finished(seconds=3.0, phases={"forward": 1.0, "backward": 2.0}, samples=5, tokens=70),
        finished(seconds=5.0, phases={"forward": 5.0}, samples=None, skipped=True),
        finished(seconds=4.0, phases={"data": 4.0}, samples=7, tokens=30, nonfinite_loss=True),
    ]

    metrics.publish(steps, PeriodTotals())

    found = recorder.snapshot()
    counted = (training.STEPS, training.SKIPPED_STEPS, training.NONFINITE_LOSSES)
    assert [found.value(spec) for spec in counted] == [3, 1, 1]
    assert (found.value(training.SAMPLES), found.value(training.TOKENS)) == (12, 100)
    assert found.values[training.PHASE_SECONDS] == {
        ("forward",): 6.0,
        ("backward",): 2.0,
        ("data",): 4.0,
    }
    durations = found.distribution(training.STEP_DURATION)
    assert durations is not None
    assert (durations.count, durations.sum) == (3, 12.0)


def test_a_loss_that_is_not_finite_is_logged_by_one_rank_and_not_in_each_step(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    first = StepMetrics(recorder, lambda _: None, None, logs_loss=True)
    steps = [
        finished(step=number, nonfinite_loss=number > 3, ended_at_unix_seconds=10.0 * number)
        for number in range(1, 7)
    ]
    again = finished(step=90, nonfinite_loss=True, ended_at_unix_seconds=900.0)

    StepMetrics(recorder, lambda _: None, None).publish(steps, PeriodTotals())
    on_other_ranks = list(caplog.messages)
    for batch in (steps[:2], steps[2:5], steps[5:], [again]):
        first.publish(batch, PeriodTotals())

    assert on_other_ranks == []
    assert [line.split(";")[0] for line in caplog.messages] == [
        "step 4: the loss is not a finite number",
        "step 90: the loss is not a finite number",
    ]


def test_samples_that_no_step_knows_have_no_series(
    recorder: Recorder, metrics: StepMetrics
) -> None:
    metrics.publish([finished(samples=None)], PeriodTotals())

    assert training.SAMPLES not in recorder.snapshot().values


def test_discarded_time_beyond_the_step_is_not_subtracted_from_others(
    recorder: Recorder, metrics: StepMetrics
) -> None:
    metrics.publish([finished(seconds=2.0), finished(seconds=1.0, discarded_seconds=3.0)], NO_CALLS)

    assert recorder.snapshot().value(training.PRODUCTIVE_SECONDS) == 2.0


NO_CALLS = PeriodTotals()
LATEST = (training.LOSS, training.GRADIENT_NORM, training.LEARNING_RATE, training.LOSS_SCALE)


def test_gauges_have_the_values_of_the_last_step(recorder: Recorder, metrics: StepMetrics) -> None:
    first = finished(loss=9.0, gradient_norm=8.0, learning_rate=7.0, loss_scale=6.0)
    last = finished(
        loss=0.5,
        gradient_norm=0.25,
        learning_rate=0.125,
        loss_scale=4096.0,
        ended_at_unix_seconds=1_790_000_000.5,
    )

    metrics.publish([first, last], NO_CALLS)

    found = recorder.snapshot()
    assert [found.value(spec) for spec in LATEST] == [0.5, 0.25, 0.125, 4096.0]
    assert found.value(training.LAST_STEP_TIMESTAMP) == 1_790_000_000.5


def test_a_value_that_the_last_step_does_not_know_stays(
    recorder: Recorder, metrics: StepMetrics
) -> None:
    metrics.publish([finished(loss=0.5, gradient_norm=0.25), finished(loss=None)], NO_CALLS)
    metrics.publish([finished(loss=0.75)], NO_CALLS)
    metrics.publish([finished(loss=None)], NO_CALLS)

    found = recorder.snapshot()
    assert [found.value(spec) for spec in LATEST] == [0.75, None, None, None]


def test_the_lowest_coverage_of_the_steps_is_published(
    recorder: Recorder, metrics: StepMetrics
) -> None:
    steps = [finished(coverage=ratio) for ratio in (1.0, 0.75, None, 0.875)]

    metrics.publish(steps, NO_CALLS)
    metrics.publish([finished(coverage=None)], NO_CALLS)

    assert recorder.snapshot().value(communication.COMM_COVERAGE_RATIO) == 0.75


def test_the_span_of_the_script_is_the_exemplar_of_its_step(
    recorder: Recorder, metrics: StepMetrics
) -> None:
    metrics.publish([finished(seconds=3.0, trace={"trace_id": "abc"})], NO_CALLS)

    durations = recorder.snapshot().distribution(training.STEP_DURATION)
    assert durations is not None
    assert [one.labels for one in durations.exemplars if one is not None] == [{"trace_id": "abc"}]


def test_flops_that_are_known_are_added_and_divided_by_the_time_of_all_steps(
    recorder: Recorder,
) -> None:
    counted = iter([6e12, None, 4e12])
    metrics = StepMetrics(recorder, lambda _: next(counted), 10e12)

    metrics.publish([finished(seconds=seconds) for seconds in (1.0, 2.0, 5.0)], NO_CALLS)

    found = recorder.snapshot()
    assert found.value(training.FLOPS) == 10e12
    assert found.value(training.MFU) == pytest.approx(10e12 / 8.0 / 10e12)


@pytest.mark.parametrize(("peak", "seconds"), [(None, 1.0), (10e12, 0.0)])
def test_flops_without_a_peak_or_a_time_have_no_utilization(
    recorder: Recorder, peak: float | None, seconds: float
) -> None:
    step = finished(seconds=seconds, phases={"forward": seconds})

    StepMetrics(recorder, lambda _: 6e12, peak).publish([step], NO_CALLS)

    assert recorder.snapshot().value(training.FLOPS) == 6e12
    assert recorder.snapshot().value(training.MFU) is None


def test_flops_that_are_unknown_have_no_series(recorder: Recorder, metrics: StepMetrics) -> None:
    metrics.publish([finished()], NO_CALLS)

    assert training.FLOPS not in recorder.snapshot().values


class TwoRanks:
    """A group of two ranks that sends half of each payload."""

    role = "dp"
    busy_until_ns = maybe_busy_until_ns = -(2**63)

    def wire_factor(self, op: int, payload_bytes: int) -> float:
        return 0.5


def calls_of(*durations_ms: int) -> list[CollectiveCall]:
    group: Any = TwoRanks()
    calls = []
    for place, duration_ms in enumerate(durations_ms):
        call = CollectiveCall(OPS.index("all_gather"), group, 100, None, PHASES.index("forward"))
        call.start_ns = 1_000_000_000 * place
        call.end_ns = call.issued_ns = call.start_ns + 1_000_000 * duration_ms
        call.settle()
        calls.append(call)
    return calls


def test_calls_are_published_by_operation_group_and_phase(
    recorder: Recorder, metrics: StepMetrics
) -> None:
    totals = PeriodTotals()
    totals.add(calls_of(3, 5, 11), CommTime(0.019, {"dp": 0.017, "tp": 0.005}))

    metrics.publish([], totals)

    found = recorder.snapshot()
    assert found.value(communication.COLLECTIVE_CALLS, "all_gather", "dp", "forward") == 3
    assert found.value(communication.COLLECTIVE_BYTES, "all_gather", "dp") == 300
    assert found.value(communication.COLLECTIVE_WIRE_BYTES, "all_gather", "dp") == 150
    assert found.value(communication.COMM_SECONDS, "dp") == 0.017
    assert found.value(communication.COMM_UNION_SECONDS) == 0.019  # less than the sum of groups
    durations = found.distribution(communication.COLLECTIVE_DURATION, "all_gather")
    assert durations is not None
    assert (durations.count, durations.sum) == (3, pytest.approx(0.019))


@pytest.mark.parametrize(
    ("groups", "shared"),
    [
        (("dp", "ep", "world"), set()),
        (("dp", "pp"), {"samples"}),
        (("dp", "tp"), {"samples", "tokens"}),
        (("sp",), {"samples", "tokens"}),
    ],
)
def test_what_ranks_train_on_together_follows_from_their_groups(
    recorder: Recorder, metrics: StepMetrics, groups: tuple[str, ...], shared: set[str]
) -> None:
    totals = PeriodTotals()
    totals.add([], CommTime(0.1, dict.fromkeys(groups, 0.1)))

    metrics.publish([], totals)

    series = recorder.snapshot().values.get(training.SHARED_WORK, {})
    assert series == {(work,): 1.0 for work in shared}


def test_the_last_step_has_the_number_of_the_engine(
    recorder: Recorder, metrics: StepMetrics
) -> None:
    metrics.publish([finished(step=1001), finished(step=1002)], PeriodTotals())

    found = recorder.snapshot()
    assert (found.value(training.LAST_STEP), found.value(training.STEPS)) == (1002, 2)


def test_calls_before_the_start_are_counted_without_a_time(
    recorder: Recorder, metrics: StepMetrics
) -> None:
    calls = calls_of(3, 5)

    metrics.publish_calls_before_start(CallBatch(calls))

    found = recorder.snapshot()
    assert found.value(communication.COLLECTIVE_CALLS, "all_gather", "dp", "forward") == 2
    assert found.distribution(communication.COLLECTIVE_DURATION, "all_gather") is None
    assert communication.COMM_SECONDS not in found.values
    assert all(call.settled for call in calls)
