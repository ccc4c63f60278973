"""The OpenMetrics text of a small run is, line by line, what promtool reads."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from recorded_metrics import STARTED, RecordedRank

from zerowatch.metrics.catalog.communication import COLLECTIVE_DURATION
from zerowatch.metrics.catalog.training import LOSS, PHASE_SECONDS
from zerowatch.metrics.exporters.openmetrics_file import write_openmetrics

TARGET = 'instance="10.0.0.3:9464",job="night",node="here"'


def exported(folder: Path, ranks=()):
    """Return what an export says of itself, and the lines of its text."""
    text = io.StringIO()
    result = write_openmetrics(folder, text, job="night", ranks=ranks)
    return result, text.getvalue().splitlines()


def test_a_value_has_the_labels_of_its_target_and_seconds_with_milliseconds(tmp_path):
    folder = tmp_path / "night-7"
    with RecordedRank(folder, 3, address="10.0.0.3:9464") as rank:
        rank.recorder.add(PHASE_SECONDS, 2.5, "data")
        rank.recorder.set(LOSS, math.inf)
        rank.tick(15.25)
        rank.recorder.set(LOSS, math.nan)
        rank.tick()

    result, lines = exported(folder)

    loss = f'{LOSS.name}{{{TARGET},rank="3",run="night-7"}}'
    phase = f'{PHASE_SECONDS.name}{{{TARGET},phase="data",rank="3",run="night-7"}}'
    begin = lines.index(f"# HELP {LOSS.name} {LOSS.help}")
    assert lines[begin + 1 : begin + 4] == [
        f"# TYPE {LOSS.name} gauge",
        f"{loss} +Inf {STARTED:.0f}.000",
        f"{loss} NaN {STARTED + 15:.0f}.250",
    ]
    begin = lines.index(f"# TYPE {PHASE_SECONDS.name.removesuffix('_total')} counter")
    assert lines[begin + 1] == f"{phase} 2.5 {STARTED:.0f}.000"
    assert lines[-1] == "# EOF"
    assert (result.run_id, result.interval_seconds) == ("night-7", 15)
    assert result.first_seconds == STARTED
    assert result.num_samples == sum(not line.startswith("#") for line in lines)


def test_each_record_is_an_answer_of_its_rank(tmp_path):
    folder = tmp_path / "night-7"
    for number in (0, 1):
        with RecordedRank(folder, number, address=None) as rank:
            rank.tick()

    _, lines = exported(folder, ranks=(1,))

    up = 'up{instance="here",job="night",node="here",rank="1",run="night-7"}'
    assert [line for line in lines if line.startswith("up{")] == [
        f"{up} 1.0 {STARTED:.0f}.000",
        f"{up} 1.0 {STARTED + 15:.0f}.000",
    ]


def test_buckets_of_one_observation_are_together_moment_by_moment(tmp_path):
    folder = tmp_path / "night-7"
    with RecordedRank(folder, 3) as rank:
        rank.recorder.observe(COLLECTIVE_DURATION, 0.00002, "all_reduce")
        rank.tick()
        rank.recorder.observe(COLLECTIVE_DURATION, 7.0, "all_reduce")

    _, lines = exported(folder)

    values = [
        (line.rpartition(" ")[2], float(line.split()[-2]))
        for line in lines
        if line.startswith(COLLECTIVE_DURATION.name)
    ]
    assert [moment for moment, _ in values] == sorted(moment for moment, _ in values)
    first = [value for moment, value in values if moment == f"{STARTED:.0f}.000"]
    second = [value for moment, value in values if moment != f"{STARTED:.0f}.000"]
    assert first == [0, *[1] * 12, 1, pytest.approx(0.00002)]
    assert second == [0, *[1] * 11, 2, 2, pytest.approx(7.00002)]


def test_a_run_without_metrics_is_an_empty_text(tmp_path):
    result, lines = exported(tmp_path)

    assert lines == ["# EOF"]
    assert (result.run_id, result.num_samples, result.series) == ("", 0, [])
    assert (result.first_seconds, result.last_seconds) == (math.inf, -math.inf)
