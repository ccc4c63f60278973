"""Tests of the metrics of steps: what counts as productive, and what is published in a stall."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes.steps import step as record

from zerowatch.metrics.catalog import generation, training
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.step_record import GenerationTotals
from zerowatch.runtime.collectives.call_batch import CallBatch
from zerowatch.runtime.collectives.totals import PeriodTotals
from zerowatch.runtime.instrumentation.raw_step import RawStep, StepCounts
from zerowatch.runtime.monitor.step_metrics import FinishedStep, StepMetrics


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def metrics(recorder: Recorder) -> StepMetrics:
    return StepMetrics(recorder, lambda _: None, None)


def finished(*, discarded_seconds: float = 0.0, skipped: bool = False, **fields) -> FinishedStep:
    raw = RawStep(
        step=1,
        ended_at=0.0,
        phase_ns=[],
        intervals=(),
        counts=StepCounts(discarded_ns=int(discarded_seconds * 1e9)),
        coverage=None,
        gradient_norm=None,
        learning_rate=None,
        loss_scale=None,
        trace=None,
        memory=None,
        batch=CallBatch([]),
    )
    return FinishedStep(replace(record(1, **fields), skipped=skipped), raw)


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
