"""Figures that follow from a step's record, and its line in the run log."""

from __future__ import annotations

import json
import math

import pytest

from zerowatch.metrics.step_record import (
    CollectiveTotals,
    GenerationTotals,
    LineWriter,
    StepRecord,
    exposed_in_training,
)

PHASES = {"forward": 2.0, "backward": 4.0, "eval": 0.5, "checkpoint": 0.25, "other": 1.0}
EXPOSED = {"backward": 0.7, "eval": 0.2, "checkpoint": 0.1}


def record(**more):
    return StepRecord(
        **{
            "step": 7,
            "ended_at_unix_seconds": 100.5,
            "seconds": 7.75,
            "phase_seconds": PHASES,
            "micro_batches": 3,
            "samples": 24,
            "tokens": 96,
            "loss": 2.5,
            "nonfinite_loss": False,
            "gradient_norm": 1.25,
            "learning_rate": 0.001,
            "loss_scale": None,
            "skipped": False,
            "collectives": {},
            "comm_seconds": 1.5,
            "comm_exposed_seconds": 1.0,
            "memory_bytes": {},
            "device_readings": {},
            "comm_exposed_phase_seconds": EXPOSED,
            **more,
        }
    )


def test_training_leaves_out_evaluation_and_checkpoints():
    assert record().training_seconds == 7.0
    assert record().training_exposed_seconds == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("exposed", "by_phase", "expected"),
    [
        (None, EXPOSED, None),
        (1.0, {}, 1.0),
        (1.0, {"eval": 0.25, "backward": 0.5}, 0.75),
        (0.25, {"eval": 0.5}, 0.0),  # two measurements: the difference may be below zero
    ],
)
def test_exposed_communication_of_training_is_not_negative(exposed, by_phase, expected):
    assert exposed_in_training(exposed, by_phase) == expected


@pytest.mark.parametrize(
    ("tokens", "seconds", "speed"),
    [(90, 1.5, 60.0), (0, 1.5, 0.0), (None, 1.5, None), (90, 0, None)],
)
def test_the_speed_of_generation_is_unknown_without_tokens_or_time(tokens, seconds, speed):
    generation = GenerationTotals(
        calls=2,
        sequences=6,
        tokens=tokens,
        seconds=seconds,
        collectives=5,
        gathers=3,
        gathered_bytes=1024,
        peak_bytes={},
    )

    assert generation.tokens_per_second == speed


def test_a_line_has_the_schema_the_rank_and_all_fields_and_null_for_no_number():
    writer = LineWriter({"rank": 3, "host": "here", "attempt": 2, "world_size": 8})
    calls = CollectiveTotals(calls=2, payload_bytes=5, wire_bytes=7.5, seconds=None)

    line = writer.line(record(loss=math.nan, collectives={"all_reduce": calls}))

    assert line.endswith(b"}\n")
    assert json.loads(line) == {
        "schema": 1,
        "rank": 3,
        "host": "here",
        "attempt": 2,
        "world_size": 8,
        "step": 7,
        "ended_at_unix_seconds": 100.5,
        "seconds": 7.75,
        "phase_seconds": PHASES,
        "micro_batches": 3,
        "samples": 24,
        "tokens": 96,
        "loss": None,
        "nonfinite_loss": False,
        "gradient_norm": 1.25,
        "learning_rate": 0.001,
        "loss_scale": None,
        "skipped": False,
        "collectives": {
            "all_reduce": {"calls": 2, "payload_bytes": 5, "wire_bytes": 7.5, "seconds": None}
        },
        "comm_seconds": 1.5,
        "comm_exposed_seconds": 1.0,
        "memory_bytes": {},
        "device_readings": {},
        "micro_batch_shapes": [],
        "peak_bytes_since_change": {},
        "oom_risk_ratio": {},
        "comm_exposed_phase_seconds": EXPOSED,
        "comm_seconds_is_upper_bound": False,
        "generation": None,
        "phases_are_host_times": False,
    }
