"""Tests of the points of the last hours: what they add up to, and that their number is bounded."""

from __future__ import annotations

from typing import Any

import pytest
from recorded_runs import STARTED, step_record

from zerowatch.metrics.catalog.labels import PHASES
from zerowatch.runtime.live_page import step_history
from zerowatch.runtime.live_page.step_history import CAUSES, Point, StepHistory, columns


@pytest.fixture
def causes():
    return [0.0] * len(CAUSES)


@pytest.fixture
def history(causes):
    return StepHistory(lambda: causes)


def add_steps(history, first, last, **changes):
    for step in range(first, last + 1):
        history.add(step_record(step, **{"comm_exposed_seconds": 0.1, **changes}))


def test_steps_of_a_second_are_one_point(history):
    add_steps(history, 1, 5)

    [first, second] = history.points()

    assert (first.step, first.steps, second.step, second.steps) == (2, 2, 4, 2)
    assert first.seconds == pytest.approx(1.0)
    assert first.phase_seconds[PHASES.index("backward")] == pytest.approx(0.6)
    assert (first.exposed_seconds, first.timed_seconds) == (pytest.approx(0.2), pytest.approx(1.0))
    assert (first.samples, first.tokens, first.loss_steps) == (16, 2048, 2)
    assert first.loss_sum == pytest.approx(5.0 + 2.5)
    assert first.peak_bytes == {"cpu": 650e6}


def test_a_step_longer_than_a_second_is_a_point_at_once(history):
    history.add(step_record(1, seconds=30.0, ended_at_unix_seconds=STARTED + 30))

    assert [point.step for point in history.points()] == [1]


def test_causes_are_the_increase_since_the_point_before(history, causes):
    causes[0] = 4.0
    add_steps(history, 1, 2)
    causes[0] = 5.5
    add_steps(history, 3, 4)

    assert [point.cause_seconds[0] for point in history.points()] == [4.0, 1.5]


def test_steps_whose_exposed_time_or_loss_is_unknown_are_left_out_of_their_ratios(history):
    history.add(step_record(1, comm_exposed_seconds=0.1))
    history.add(step_record(2, comm_exposed_seconds=None, loss=None))

    shown = columns(history.points())

    assert shown["exposed_ratio"] == [pytest.approx(0.2)]
    assert shown["loss"] == [5.0]


def test_a_point_without_any_known_value_is_null(history):
    changes = {"comm_exposed_seconds": None, "loss": None, "samples": None, "tokens": None}
    add_steps(history, 1, 2, memory_bytes={}, **changes)

    shown = columns(history.points())

    names = ("exposed_ratio", "loss", "samples_per_second", "tokens_per_second")
    assert [shown[name] for name in names] == [[None]] * 4
    assert shown["peak_bytes"] == {}


def test_columns_have_one_value_per_point(history):
    add_steps(history, 1, 20)

    shown = columns(history.points())

    assert len(shown["ended_at"]) == 10
    assert shown["phases"]["backward"] == [pytest.approx(0.3)] * 10
    assert "checkpoint" not in shown["phases"]
    assert shown["samples_per_second"] == [pytest.approx(16.0)] * 10
    assert shown["peak_bytes"] == {"cpu": [650e6] * 10}


def test_new_points_have_numbers_and_merged_ones_are_no_longer_available(history, monkeypatch):
    monkeypatch.setattr(step_history, "RECENT_POINTS", 3)
    add_steps(history, 1, 10)  # five points

    assert history.num_closed == 5
    assert [point.step for point in history.since(3)] == [8, 10]
    assert history.since(5) == []
    assert history.since(1) is None
    assert history.since(6) is None


def test_older_points_are_merged_and_their_number_is_bounded(history, monkeypatch):
    monkeypatch.setattr(step_history, "RECENT_POINTS", 10)
    add_steps(history, 1, 120)  # a minute

    points = history.points()

    assert [point.step for point in points[-10:]] == list(range(102, 122, 2))
    assert [round(point.seconds) for point in points[:-10]] == [12, 12, 12, 12, 2]
    assert sum(point.steps for point in points) == 120
    assert sum(point.samples for point in points) == 120 * 8


def test_a_hundred_thousand_steps_need_bounded_memory(history):
    add_steps(history, 1, 100_000)

    points = history.points()

    assert len(points) <= step_history.RECENT_POINTS + step_history.COARSE_POINTS
    assert points[-1].ended_at - points[0].started_at > 6 * 3600


def test_the_last_seconds_have_a_minimum_of_steps(history):
    add_steps(history, 1, 40)

    assert history.last_seconds(5.0, min_steps=1).steps == 10
    assert history.last_seconds(5.0, min_steps=25).steps == 26
    assert history.last_seconds(3600.0, min_steps=1).steps == 40


def test_reading_does_not_change_the_points(history):
    add_steps(history, 1, 40)

    before = columns(history.points())
    history.last_seconds(60.0, min_steps=1)

    assert columns(history.points()) == before


def test_a_history_without_steps_has_no_points(history):
    assert history.points() == []
    assert history.last_seconds(60.0, min_steps=1) is None
    assert columns([])["ended_at"] == []


def test_exposed_communication_of_evaluation_is_no_part_of_training(history):
    history.add(
        step_record(
            1,
            seconds=2.0,
            phase_seconds={"forward": 0.2, "backward": 0.2, "eval": 1.6},
            comm_seconds=1.2,
            comm_exposed_seconds=1.0,
            comm_exposed_phase_seconds={"eval": 0.95, "backward": 0.05},
        )
    )

    assert columns(history.points())["exposed_ratio"] == [pytest.approx(0.05 / 0.4)]


@pytest.mark.parametrize("change", [-3600.0, 3600.0])
def test_a_clock_that_is_set_delays_no_point_and_falsifies_no_rate(history, change):
    add_steps(history, 1, 10)

    for step in range(11, 21):
        history.add(step_record(step, ended_at_unix_seconds=STARTED + 0.5 * step + change))

    shown = columns(history.points())
    assert shown["step"] == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]
    assert shown["ended_at"] == sorted(set(shown["ended_at"]))
    assert shown["samples_per_second"] == [pytest.approx(16.0)] * 10


def point(step: int, seconds: float, **changes: Any) -> Point:
    fields: dict[str, Any] = {
        "step": step,
        "ended_at": STARTED + step,
        "seconds": seconds,
        "steps": 2,
        "phase_seconds": [0.0, seconds, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        "timed_seconds": seconds,
        "exposed_seconds": 0.5,
        "loss_sum": 3.0,
        "loss_steps": 2,
        "nonfinite_losses": 1,
        "samples": 8,
        "tokens": 64,
        "peak_bytes": {"cpu": 5.0},
        "cause_seconds": [0.25, 0.0, 0.5, 0.0],
    }
    return Point(**{**fields, **changes})


def test_a_merged_point_has_the_sums_the_highest_memory_and_the_later_end() -> None:
    merged = point(3, 1.5)
    later = point(
        7,
        2.5,
        steps=3,
        exposed_seconds=0.25,
        loss_sum=4.0,
        loss_steps=1,
        nonfinite_losses=2,
        samples=5,
        tokens=40,
        peak_bytes={"cpu": 4.0, "cuda:0": 9.0},
        cause_seconds=[0.5, 1.0, 0.0, 0.0],
    )

    merged.merge(later)

    assert merged == point(
        7,
        4.0,
        steps=5,
        exposed_seconds=0.75,
        loss_sum=7.0,
        loss_steps=3,
        nonfinite_losses=3,
        samples=13,
        tokens=104,
        peak_bytes={"cpu": 5.0, "cuda:0": 9.0},
        cause_seconds=[0.75, 1.0, 0.5, 0.0],
    )
    assert merged.started_at == STARTED + 3


def test_training_time_is_that_of_all_phases_but_evaluation_and_checkpoints() -> None:
    phases = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]

    assert point(1, 255.0, phase_seconds=phases).training_seconds == 255 - 16 - 64


def test_the_columns_of_a_point_are_means_per_step_and_rates_per_second() -> None:
    phases = [0.0, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.25]
    points = [
        point(3, 2.0, phase_seconds=phases, peak_bytes={"cuda:0": 7.0}),
        point(5, 4.0, steps=4, timed_seconds=0.0, loss_steps=0, samples=0, tokens=0),
    ]

    assert columns(points) == {
        "step": [3, 5],
        "steps": [2, 4],
        "ended_at": [STARTED + 3, STARTED + 5],
        "phases": {
            "forward": [0.5, 1.0],
            "backward": [0.25, 0.0],
            "other": [0.125, 0.0],
        },
        "exposed_ratio": [0.25, None],
        "loss": [1.5, None],
        "samples_per_second": [4.0, None],
        "tokens_per_second": [32.0, None],
        "peak_bytes": {"cpu": [None, 5.0], "cuda:0": [7.0, None]},
    }


def test_a_step_is_a_point_with_the_values_of_its_record(history: StepHistory) -> None:
    history.add(
        step_record(
            9,
            seconds=3.0,
            phase_seconds={"data": 0.25, "forward": 0.75, "eval": 0.5, "checkpoint": 1.5},
            loss=2.5,
            nonfinite_loss=True,
            samples=None,
            tokens=None,
            comm_exposed_seconds=0.75,
            comm_exposed_phase_seconds={"forward": 0.25, "eval": 0.5},
            memory_bytes={"cpu": {"allocated": 1.0}, "cuda:0": {"peak_allocated": 7.0}},
        )
    )

    assert history.points() == [
        Point(
            step=9,
            ended_at=STARTED + 4.5,
            seconds=3.0,
            steps=1,
            phase_seconds=[0.25, 0.75, 0.0, 0.0, 0.5, 0.0, 1.5, 0.0],
            timed_seconds=1.0,
            exposed_seconds=0.25,
            loss_sum=2.5,
            loss_steps=1,
            nonfinite_losses=1,
            samples=0,
            tokens=0,
            peak_bytes={"cuda:0": 7.0},
            cause_seconds=[0.0] * 4,
        )
    ]
    assert history.nonfinite_at == STARTED + 4.5
