"""Tests of the reader of metrics logs: whole ones, and files as a killed run leaves them.

They cover metrics/metrics_log_reader.py too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from recorded_metrics import STARTED, RecordedRank

from zerowatch.metrics.catalog import communication, training
from zerowatch.metrics.exporters.series_table import Family
from zerowatch.metrics.metrics_log_reader import SeriesKey
from zerowatch.runtime.reports.metrics_reader import RankMetrics, RecordedMetrics, read_metrics


def record(folder: Path, losses: list[float], **options: object) -> Path:
    """Write a line for each loss, and one at the end, each after one more step."""
    with RecordedRank(folder, **options) as rank:  # type: ignore[arg-type]
        for loss in losses:
            rank.recorder.set(training.LOSS, loss)
            rank.recorder.add(training.STEPS, 1)
            rank.recorder.add(communication.COMM_CAUSE_SECONDS, 0.25, "latency")
            rank.recorder.add(communication.COMM_CAUSE_SECONDS, 0.5, "bandwidth")
            rank.tick()
    return rank.path


def loss(found: RecordedMetrics) -> float | None:
    return found.ranks[0].value("zerowatch_loss")


def test_last_values_values_over_time_and_totals_of_a_run(tmp_path: Path) -> None:
    record(tmp_path, [3.0, 2.0, 1.0])

    found = read_metrics(tmp_path)
    rank = found.ranks[0]
    assert found.problems == []
    assert rank.value("zerowatch_loss") == 1.0
    assert rank.value("zerowatch_mfu_ratio") is None
    assert rank.value("zerowatch_comm_cause_seconds_total") is None  # several series
    assert rank.value("zerowatch_comm_cause_seconds_total", cause="latency") == 0.75
    assert rank.total("zerowatch_comm_cause_seconds_total") == 2.25
    assert rank.total("zerowatch_oom_errors_total") is None
    causes = rank.values("zerowatch_comm_cause_seconds_total")
    assert causes == {(("cause", "latency"),): 0.75, (("cause", "bandwidth"),): 1.5}
    seconds, losses = rank.over_time("zerowatch_loss")
    assert list(seconds - STARTED) == [0, 15, 30, 45]
    assert list(losses) == [3.0, 2.0, 1.0, 1.0]
    assert list(rank.over_time("zerowatch_comm_cause_seconds_total")[1]) == [0.75, 1.5, 2.25, 2.25]
    [family] = {key.family for key in rank.series("zerowatch_loss")}
    assert (family.kind, family.help) == ("gauge", training.LOSS.help)


def test_a_series_that_began_later_has_no_value_before(tmp_path: Path) -> None:
    with RecordedRank(tmp_path) as rank:
        rank.tick()
        rank.recorder.set(training.LOSS, 2.0)

    seconds, losses = read_metrics(tmp_path).ranks[0].over_time("zerowatch_loss")
    assert len(seconds) == 2
    assert np.isnan(losses[0])
    assert losses[1] == 2.0


def test_counters_are_added_up_over_the_attempts_of_a_rank(tmp_path: Path) -> None:
    record(tmp_path, [3.0, 2.0])
    record(tmp_path, [2.5], attempt=1, begins_at=100.0)

    found = read_metrics(tmp_path)
    rank = found.ranks[0]
    assert found.problems == []
    assert [head.attempt for head in rank.heads] == [0, 1]
    assert rank.value("zerowatch_steps_total") == 1
    assert rank.total("zerowatch_steps_total") == 3
    assert list(rank.over_time("zerowatch_steps_total")[1]) == [1, 2, 2, 1, 1]
    assert list(rank.over_time("zerowatch_loss")[0] - STARTED) == [0, 15, 30, 100, 115]


def test_several_ranks_and_segments_are_one_history_per_rank(tmp_path: Path) -> None:
    for rank in (0, 1):
        options = {"rank": rank, "segment_bytes": 4096, "max_segments": 50}
        record(tmp_path, [float(step) for step in range(20)], **options)

    found = read_metrics(tmp_path)
    assert len(list(tmp_path.glob("metrics-1.*.jsonl"))) >= 2
    assert found.problems == []
    assert sorted(found.ranks) == [0, 1]
    losses = found.ranks[1].over_time("zerowatch_loss")[1]
    assert list(losses) == [*range(20), 19]


def test_a_half_written_last_line_is_a_problem_and_the_rest_is_read(tmp_path: Path) -> None:
    path = record(tmp_path, [3.0, 2.0])
    os.truncate(path, path.stat().st_size - 5)

    found = read_metrics(tmp_path)
    assert loss(found) == 2.0
    assert len(found.ranks[0].unix_seconds) == 2
    [problem] = found.problems
    assert "half written" in problem
    assert f"{path}:3" in problem


def test_a_restart_after_a_half_written_line_loses_that_line_only(tmp_path: Path) -> None:
    path = record(tmp_path, [3.0, 2.0])
    os.truncate(path, path.stat().st_size - 5)
    record(tmp_path, [1.5], attempt=1, begins_at=100.0)

    found = read_metrics(tmp_path)
    assert list(found.ranks[0].over_time("zerowatch_loss")[1]) == [3.0, 2.0, 1.5, 1.5]
    [problem] = found.problems
    assert f"{path}:3" in problem


def test_lines_before_the_first_list_of_series_are_left_out(tmp_path: Path) -> None:
    path = record(tmp_path, [3.0, 2.0])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[1:]))  # somebody has kept the end of a large file

    found = read_metrics(tmp_path)
    assert found.ranks == {}
    [problem] = found.problems
    assert "2 lines" in problem


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[1, 2]",
        '{"number": 1}',
        "\x00\x00",
        '{"session":1790000000,"number":9,"time":1,"indices":[9999],"values":[1.0]}',
    ],
)
def test_a_damaged_line_is_left_out(tmp_path: Path, damage: str) -> None:
    path = record(tmp_path, [3.0, 2.0, 1.0])
    lines = path.read_text().splitlines()
    lines[1] = damage
    path.write_text("\n".join(lines) + "\n")

    found = read_metrics(tmp_path)
    assert loss(found) == 1.0
    assert any(f"{path}:2" in problem for problem in found.problems)


@pytest.mark.parametrize(
    ("place", "change"),
    [
        (1, {"cost_seconds": "x"}),
        (1, {"time": "nan"}),
        (1, {"session": 1e308}),
        (0, {"series": [{"family": 0, "name": "x", "labels": {"a": []}}]}),
        (0, {"series": [{"family": "0", "name": "x", "labels": {}}]}),
        (0, {"families": [{"name": [], "kind": "gauge", "help": ""}]}),
        (0, {"head": {"run_id": []}}),
    ],
)
def test_a_value_of_another_type_is_damage(
    tmp_path: Path, place: int, change: dict[str, object]
) -> None:
    path = record(tmp_path, [3.0, 2.0, 1.0])
    lines = path.read_text().splitlines()
    lines[place] = json.dumps({**json.loads(lines[place]), **change})
    path.write_text("\n".join(lines) + "\n")

    problems = read_metrics(tmp_path).problems

    assert any(f"{path}:{place + 1}" in problem for problem in problems)


def test_lost_lines_are_counted(tmp_path: Path) -> None:
    path = record(tmp_path, [3.0, 2.0, 1.0])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:1] + lines[3:]))

    [problem] = read_metrics(tmp_path).problems
    assert "2 records are missing" in problem


def test_a_later_schema_is_refused_with_its_number(tmp_path: Path) -> None:
    path = record(tmp_path, [3.0])
    first, *others = path.read_text().splitlines()
    later = json.dumps({**json.loads(first), "schema": 99})
    path.write_text("\n".join([later, *others]) + "\n")

    found = read_metrics(tmp_path)
    assert found.ranks == {}
    assert any("schema 99" in problem for problem in found.problems)


def test_a_run_without_metrics_logs_and_an_empty_file_are_problems(tmp_path: Path) -> None:
    [problem] = read_metrics(tmp_path).problems
    assert "run_log.metrics_interval_seconds" in problem

    (tmp_path / "metrics-0.jsonl").touch()
    [problem] = read_metrics(tmp_path).problems
    assert "metrics-0.jsonl: is empty" in problem


def test_a_long_run_is_kept_at_a_lower_resolution(tmp_path: Path) -> None:
    record(tmp_path, [float(step) for step in range(100)])

    rank = read_metrics(tmp_path, max_snapshots=10).ranks[0]
    seconds, losses = rank.over_time("zerowatch_loss")
    assert list(losses) == [0, 16, 32, 48, 64, 80, 96, 99]
    assert seconds[-1] - STARTED == 100 * 15
    assert rank.total("zerowatch_steps_total") == 100


def test_only_the_named_series_are_kept_over_time(tmp_path: Path) -> None:
    record(tmp_path, [3.0, 2.0])

    rank = read_metrics(tmp_path, frozenset({"zerowatch_loss"})).ranks[0]
    assert len(rank.over_time("zerowatch_loss")[0]) == 3
    assert len(rank.over_time("zerowatch_steps_total")[0]) == 0
    assert rank.value("zerowatch_steps_total") == 2


def key(name: str, **labels: str) -> SeriesKey:
    family = Family(name=name, kind="counter", help="")
    return SeriesKey(family=family, name=name, labels=tuple(labels.items()))


DP, TP, OTHER = key("x", group="dp"), key("x", group="tp"), key("y", group="dp")


def test_the_figures_of_a_rank_are_of_the_matching_series_and_all_its_processes() -> None:
    rank = RankMetrics(
        last={DP: 5.0, OTHER: 7.0},
        last_by_session=[{DP: 1.0, TP: 3.0}, {DP: 5.0, OTHER: 7.0}],
        unix_seconds=np.array([10.0, 20.0, 30.0]),
        columns={
            DP: np.array([1.0, np.nan, np.nan]),
            TP: np.array([2.0, 4.0, np.nan]),
            OTHER: np.array([8.0, 8.0, 8.0]),
        },
    )

    assert (rank.total("x"), rank.total("x", group="dp"), rank.total("z")) == (9.0, 6.0, None)
    assert (rank.value("x"), rank.value("y"), rank.value("x", group="tp")) == (5.0, 7.0, None)
    assert rank.values("x") == {(("group", "dp"),): 5.0}
    assert rank.series("x") == [DP, TP]
    seconds, values = rank.over_time("x")
    assert seconds.tolist() == [10, 20, 30]
    assert values[:2].tolist() == [3, 4] and np.isnan(values[2])
    assert [each.size for each in rank.over_time("z")] == [0, 0]


@pytest.mark.parametrize(("losses", "kept"), [(3, [0, 1, 2, 2]), (4, [0, 2, 3]), (5, [0, 2, 4, 4])])
def test_at_most_the_given_number_of_snapshots_and_the_last_are_kept(
    tmp_path: Path, losses: int, kept: list[float]
) -> None:
    record(tmp_path, [float(step) for step in range(losses)])

    rank = read_metrics(tmp_path, max_snapshots=4).ranks[0]

    assert rank.over_time(training.LOSS.name)[1].tolist() == kept
    assert rank.unix_seconds[-1] - STARTED == 15 * losses
