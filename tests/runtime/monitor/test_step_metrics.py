"""Tests of the metrics of steps: what counts as productive, and what is published in a stall."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.steps import step as record

from zerowatch.metrics.catalog import training
from zerowatch.metrics.recorder import Recorder
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
