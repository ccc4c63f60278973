"""Tests of the names and values that sinks get: those of the run log and of /metrics."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from fakes.steps import collective, step

from zerowatch.metrics.catalog.communication import COLLECTIVE_BYTES
from zerowatch.metrics.catalog.memory import MEMORY_PEAK
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


def test_the_names_and_values_of_a_step_are_complete() -> None:
    phases = {"forward": 0.25, "backward": 0.5}
    one = step(
        3, seconds=0.75, phases=phases, comm=0.125, all_reduce=collective(calls=2, seconds=1.5)
    )
    one = replace(one, loss_scale=1024.0, nonfinite_loss=True, oom_risk_ratio={"cpu": 0.375})

    assert step_values(replace(one, micro_batch_shapes=[(4, 16)])) == {
        "zerowatch/step": 3.0,
        "zerowatch/seconds": 0.75,
        "zerowatch/phase_seconds/forward": 0.25,
        "zerowatch/phase_seconds/backward": 0.5,
        "zerowatch/micro_batches": 1.0,
        "zerowatch/samples": 8.0,
        "zerowatch/loss": 5.0,
        "zerowatch/nonfinite_loss": 1.0,
        "zerowatch/loss_scale": 1024.0,
        "zerowatch/skipped": 0.0,
        "zerowatch/collectives/all_reduce/calls": 2.0,
        "zerowatch/collectives/all_reduce/payload_bytes": 2000.0,
        "zerowatch/collectives/all_reduce/wire_bytes": 1000.0,
        "zerowatch/collectives/all_reduce/seconds": 1.5,
        "zerowatch/comm_seconds": 0.125,
        "zerowatch/comm_exposed_seconds": 0.125,
        "zerowatch/memory_bytes/cpu/peak_allocated": 1e6,
        "zerowatch/device_readings/cpu/utilization_ratio": 0.5,
        "zerowatch/oom_risk_ratio/cpu": 0.375,
        "zerowatch/comm_seconds_is_upper_bound": 0.0,
        "zerowatch/phases_are_host_times": 0.0,
    }


def test_an_empty_label_is_not_part_of_a_name_and_a_metric_that_is_not_finite_is_absent() -> None:
    recorder = Recorder()
    recorder.set(STEPS, math.inf)
    recorder.set(MEMORY_PEAK, 64, "", "allocated")

    assert metric_values(recorder.snapshot()) == {
        "zerowatch/metrics/memory_peak_bytes/allocated": 64.0
    }
