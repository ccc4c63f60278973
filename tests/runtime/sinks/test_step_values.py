"""Tests of the names and values that sinks get: those of the run log and of /metrics."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from fakes.steps import collective, step

from zerowatch.metrics.catalog.communication import COLLECTIVE_BYTES
from zerowatch.metrics.catalog.training import RUN_INFO, STEP_DURATION, STEPS
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.step_record import LineWriter, StepRecord
from zerowatch.runtime.sinks.step_values import metric_values, step_values


def record(loss: float | None = 2.5) -> StepRecord:
    one = step(3, loss=loss, all_reduce=collective(calls=2, seconds=None))
    return replace(one, skipped=True, tokens=128, micro_batch_shapes=[(4, 16)])


def test_the_values_of_a_step_are_those_of_its_line_in_the_run_log() -> None:
    line = json.loads(LineWriter({}).line(record()))

    values = step_values(record())

    assert values["zerowatch/step"] == line["step"]
    assert values["zerowatch/samples"] == line["samples"]
    assert values["zerowatch/tokens"] == line["tokens"]
    assert values["zerowatch/loss"] == line["loss"]
    assert values["zerowatch/phase_seconds/backward"] == line["phase_seconds"]["backward"]
    assert values["zerowatch/collectives/all_reduce/calls"] == 2
    assert values["zerowatch/memory_bytes/cpu/peak_allocated"] == 1e6
    assert values["zerowatch/skipped"] == 1


@pytest.mark.parametrize("loss", [math.nan, math.inf, None])
def test_a_value_that_is_unknown_or_not_finite_is_absent(loss: float | None) -> None:
    values = step_values(record(loss=loss))

    assert "zerowatch/loss" not in values
    assert "zerowatch/gradient_norm" not in values
    assert "zerowatch/collectives/all_reduce/seconds" not in values


def test_a_metric_has_its_labels_in_its_name_and_a_histogram_its_sum_and_count() -> None:
    recorder = Recorder()
    recorder.set(STEPS, 7)
    labels = [label.values[0] if label.values else "x" for label in COLLECTIVE_BYTES.labels]
    recorder.set(COLLECTIVE_BYTES, 64, *labels)
    recorder.observe(STEP_DURATION, 0.5)
    recorder.observe(STEP_DURATION, 1.5)
    recorder.set_info(RUN_INFO, *("x" for _ in RUN_INFO.labels))

    values = metric_values(recorder.snapshot())

    assert values == {
        "zerowatch/metrics/steps_total": 7,
        "/".join(["zerowatch/metrics/collective_bytes_total", *labels]): 64,
        "zerowatch/metrics/step_duration_seconds/sum": 2,
        "zerowatch/metrics/step_duration_seconds/count": 2,
    }
