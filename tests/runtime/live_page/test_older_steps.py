"""Tests of steps sampled from the run log: their spacing, segments, and damaged lines."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from recorded_runs import STARTED, step_record, write_run

from zerowatch.metrics.settings import RunLogSettings
from zerowatch.metrics.step_record import StepRecord
from zerowatch.runtime.live_page import older_steps
from zerowatch.runtime.live_page.older_steps import MAX_LINE_BYTES, sample_steps, segments
from zerowatch.runtime.live_page.step_history import Point
from zerowatch.runtime.monitor.step_log import StepLog

LONG_AFTER = STARTED + 1e9


def steps_of(points):
    return [point.step for point in points]


def test_all_steps_are_returned_if_there_are_few(tmp_path):
    folder = write_run(tmp_path / "run", steps=10)

    points = sample_steps(folder, 0, LONG_AFTER, 100)

    assert steps_of(points) == list(range(1, 11))
    assert points[0].loss_sum == 5.0
    assert points[0].peak_bytes == {"cpu": 650e6}


def test_many_steps_are_sampled_evenly(tmp_path):
    folder = write_run(tmp_path / "run", ranks=1, steps=5000)

    steps = steps_of(sample_steps(folder, 0, LONG_AFTER, 100))

    gaps = [later - earlier for earlier, later in pairwise(steps)]
    assert 90 <= len(steps) <= 100
    assert steps[0] == 1
    assert steps[-1] > 4900
    assert max(gaps) <= 2 * 50


def test_only_steps_before_the_given_time_are_returned(tmp_path):
    folder = write_run(tmp_path / "run", ranks=1, steps=1000)

    steps = steps_of(sample_steps(folder, 0, STARTED + 0.5 * 101, 1000))

    assert steps == list(range(1, 101))


def test_rotated_segments_are_read_from_the_oldest_on(tmp_path):
    settings = RunLogSettings(segment_bytes=4096, max_segments=5)
    identity = {"run_id": "run", "rank": 0, "attempt": 0}
    log = StepLog(tmp_path, identity, settings)
    for step in range(1, 31):
        log.append(step_record(step))
    log.close()

    steps = steps_of(sample_steps(tmp_path, 0, LONG_AFTER, 1000))

    assert len(segments(tmp_path, 0)) > 2
    assert steps == list(range(steps[0], 31))


def test_a_segment_that_is_rotated_meanwhile_does_not_prevent_the_reading(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", ranks=1, steps=4)
    listed = [folder / "rank-0.1.jsonl", folder / "rank-0.jsonl"]
    monkeypatch.setattr(older_steps, "segments", lambda folder, rank: listed)

    assert steps_of(sample_steps(folder, 0, LONG_AFTER, 100)) == [1, 2, 3, 4]


def test_damaged_lines_are_left_out(tmp_path):
    folder = write_run(tmp_path / "run", ranks=1, steps=4)
    log = folder / "rank-0.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    lines[1] = b'{"step": 2, "secon\n'
    lines[2] = b"[]\n"
    log.write_bytes(b"".join(lines) + b'{"step": 5')

    assert steps_of(sample_steps(folder, 0, LONG_AFTER, 100)) == [1, 4]


@pytest.mark.parametrize(
    ("field", "value"),
    [("memory_bytes", None), ("ended_at_unix_seconds", None), ("phase_seconds", 3), ("loss", "x")],
)
def test_a_record_with_a_value_of_another_type_is_left_out(tmp_path, field, value):
    folder = write_run(tmp_path / "run", ranks=1, steps=4)
    log = folder / "rank-0.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    records[1][field] = value
    log.write_text("".join(f"{json.dumps(record)}\n" for record in records))

    assert steps_of(sample_steps(folder, 0, LONG_AFTER, 100)) == [1, 3, 4]


def test_a_line_longer_than_the_first_read_is_found(tmp_path):
    shapes = [(8, length) for length in range(MAX_LINE_BYTES // 20)]
    folder = write_run(
        tmp_path / "run",
        ranks=1,
        steps=3,
        record=lambda _, step: step_record(step, micro_batch_shapes=shapes),
    )

    assert steps_of(sample_steps(folder, 0, LONG_AFTER, 100)) == [1, 2, 3]


@pytest.mark.parametrize("content", [None, b"", b"no record\n"])
def test_a_missing_or_empty_log_has_no_steps(tmp_path, content):
    if content is not None:
        (tmp_path / "rank-0.jsonl").write_bytes(content)

    assert sample_steps(tmp_path, 0, LONG_AFTER, 100) == []


def test_an_older_step_has_the_values_of_its_record(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return step_record(
            step,
            seconds=3.0,
            phase_seconds={"data": 0.25, "forward": 0.75, "eval": 0.5, "checkpoint": 1.5},
            loss=2.5,
            nonfinite_loss=True,
            samples=6,
            tokens=96,
            comm_exposed_seconds=0.75,
            comm_exposed_phase_seconds={"forward": 0.25, "eval": 0.5},
            memory_bytes={"cpu": {"allocated": 1.0}, "cuda:0": {"peak_allocated": 7.0}},
        )

    folder = write_run(tmp_path / "run", ranks=1, steps=1, record=record)

    assert sample_steps(folder, 0, LONG_AFTER, 100) == [
        Point(
            step=1,
            ended_at=STARTED + 0.5,
            seconds=3.0,
            steps=1,
            phase_seconds=[0.25, 0.75, 0.0, 0.0, 0.5, 0.0, 1.5, 0.0],
            timed_seconds=1.0,
            exposed_seconds=0.25,
            loss_sum=2.5,
            loss_steps=1,
            nonfinite_losses=1,
            samples=6,
            tokens=96,
            peak_bytes={"cuda:0": 7.0},
        )
    ]


def test_a_record_without_optional_values_is_a_step(tmp_path: Path) -> None:
    record = {"step": 3, "ended_at_unix_seconds": 7.0, "seconds": 2.0, "phase_seconds": {}}
    (tmp_path / "rank-0.jsonl").write_text(f"{json.dumps(record)}\n")

    [point] = sample_steps(tmp_path, 0, LONG_AFTER, 1)

    assert (point.step, point.loss_steps, point.samples, point.timed_seconds) == (3, 0, 0, 0.0)


@pytest.mark.parametrize(
    ("max_steps", "steps"), [(0, []), (1, [1]), (2, [1, 3]), (4, [1, 2, 3, 4])]
)
def test_the_number_of_steps_is_bounded(tmp_path: Path, max_steps: int, steps: list[int]) -> None:
    folder = write_run(
        tmp_path / "run", ranks=1, steps=4, record=lambda rank, step: step_record(step, loss=1.5)
    )

    assert steps_of(sample_steps(folder, 0, LONG_AFTER, max_steps)) == steps


def test_a_step_that_ended_at_the_given_time_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ranks=1, steps=4)

    assert steps_of(sample_steps(folder, 0, STARTED + 1.5, 100)) == [1, 2]


def test_segments_are_sorted_by_their_numbers(tmp_path: Path) -> None:
    for name in ("rank-0.jsonl", "rank-0.2.jsonl", "rank-0.10.jsonl", "rank-0.x.jsonl"):
        (tmp_path / name).touch()

    assert [path.name for path in segments(tmp_path, 0)] == [
        "rank-0.10.jsonl",
        "rank-0.2.jsonl",
        "rank-0.jsonl",
    ]
