"""Tests of reading a run folder: values as written, and what is said about damaged parts."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recorded_runs import STARTED, step_record, write_run

from zerowatch.metrics.step_record import CollectiveTotals, StepRecord
from zerowatch.runtime.reports import run_reader
from zerowatch.runtime.reports.run_reader import RunFolderError, read_run


def test_each_value_of_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", ranks=2, steps=10))

    steps = run.ranks[1]
    assert run.problems == []
    assert (run.run_id, run.world_size, run.attempts) == ("run", 2, (STARTED,))
    assert steps.column("step").tolist() == list(range(1, 11))
    assert steps.column("ended_at")[-1] == STARTED + 5
    assert steps.column("loss")[1] == pytest.approx(2.5)
    assert steps.total("phase.backward") == pytest.approx(3.0)
    assert steps.total("collective.all_reduce.calls") == 20
    assert steps.column("memory.cpu.peak_allocated")[0] == pytest.approx(650e6)
    assert steps.column("device.cpu.utilization_ratio")[0] == pytest.approx(0.75)
    assert steps.names("phase") == ["forward", "backward", "optimizer", "other"]


def test_a_phase_or_collective_that_begins_later_is_zero_before(tmp_path: Path) -> None:
    totals = CollectiveTotals(calls=1, payload_bytes=10, wire_bytes=5.0, seconds=None)

    def record(rank: int, step: int) -> StepRecord:
        later = step_record(step, collectives={"broadcast": totals}, phase_seconds={"eval": 0.5})
        return later if step > 5 else step_record(step)

    steps = read_run(write_run(tmp_path / "run", record=record)).ranks[0]

    assert steps.column("phase.eval").tolist() == [0.0] * 5 + [0.5] * 5
    assert steps.total("collective.broadcast.calls") == 5
    assert steps.column("collective.all_reduce.calls").tolist() == [2.0] * 5 + [0.0] * 5
    assert np.isnan(steps.column("collective.broadcast.seconds")[-1])  # not timed


def test_an_unknown_value_is_nan_and_not_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", record=lambda rank, step: step_record(step, loss=None))

    steps = read_run(folder).ranks[0]

    assert np.isnan(steps.column("loss")).all()
    assert steps.total("loss") is None
    assert steps.total("no such column") is None
    assert len(steps.column("no such column")) == 10


def test_segments_are_read_from_the_oldest_to_the_newest(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ranks=1, steps=9)
    lines = (folder / "rank-0.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "rank-0.2.jsonl").write_bytes(b"".join(lines[:3]))
    (folder / "rank-0.1.jsonl").write_bytes(b"".join(lines[3:6]))
    (folder / "rank-0.jsonl").write_bytes(b"".join(lines[6:]))

    run = read_run(folder)

    assert run.ranks[0].column("step").tolist() == list(range(1, 10))
    assert run.problems == []


def test_deleted_segments_and_gaps_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ranks=1, steps=30)
    lines = (folder / "rank-0.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "rank-0.1.jsonl").write_bytes(b"".join(lines[10:15]))
    (folder / "rank-0.jsonl").write_bytes(b"".join(lines[18:]))

    problems = read_run(folder).problems

    assert any("steps 1 to 10 are missing" in problem for problem in problems)
    assert any("3 steps are missing within the log" in problem for problem in problems)


def test_a_thinned_log_has_no_gaps(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return step_record(10 * step)

    assert read_run(write_run(tmp_path / "run", record=record)).problems == []


def test_a_cut_last_line_is_left_out_and_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ranks=1)
    log = folder / "rank-0.jsonl"
    log.write_bytes(log.read_bytes()[:-100])

    run = read_run(folder)

    assert run.ranks[0].num_steps == 9
    (problem,) = run.problems
    assert "rank-0.jsonl" in problem and "cut" in problem


def test_a_log_that_ends_long_before_those_of_other_ranks_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=100)
    log = folder / "rank-1.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:7]))

    assert read_run(folder).problems == ["rank 1: its log ends with step 7 of 100"]


@pytest.mark.parametrize(
    "damage", [b'{"half": \n', b"\0" * 50 + b"\n", b"[1, 2]\n", b'{"step": "seven"}\n', b"null\n"]
)
def test_a_damaged_line_is_left_out_and_counted(tmp_path: Path, damage: bytes) -> None:
    folder = write_run(tmp_path / "run", ranks=1)
    log = folder / "rank-0.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:4], damage, *lines[4:]]))

    run = read_run(folder)

    assert run.ranks[0].num_steps == 10
    assert run.problems[0] == "rank-0.jsonl: 1 damaged line(s) are left out"


def test_an_endless_line_takes_no_memory(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ranks=1)
    with open(folder / "rank-0.jsonl", "ab") as log:
        log.truncate(300 * 2**20)  # as after a crash of the machine: sparse zeros
    tracemalloc.start()

    run = read_run(folder)

    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert run.ranks[0].num_steps == 10
    assert run.problems[0] == "rank-0.jsonl: 1 damaged line(s) are left out"
    assert peak_bytes < 40 * 2**20


def test_missing_ranks_and_empty_logs_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ranks=4)
    (folder / "rank-1.jsonl").unlink()
    (folder / "rank-3.jsonl").write_bytes(b"")

    run = read_run(folder)

    assert list(run.ranks) == [0, 2]
    assert "rank-3.jsonl is empty: the rank recorded no step" in run.problems
    assert "no steps of 2 of 4 ranks: 1, 3" in run.problems


def test_a_run_without_a_step_has_no_ranks(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"cut": ')

    run = read_run(tmp_path)

    assert (run.ranks, run.world_size, run.settings) == ({}, None, {})
    assert "settings.json is damaged or cut" in run.problems
    assert any("no step is recorded" in problem for problem in run.problems)


def test_damaged_small_files_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "decisions.jsonl").write_text('{"knob": "python_gc"}\n{"cut": \n')
    (folder / "attempts.jsonl").write_text("nothing\n")
    (folder / "targets.json").write_text("{}")
    (folder / "settings.json").unlink()

    run = read_run(folder)

    assert run.decisions == ({"knob": "python_gc"},)
    assert (run.attempts, run.settings, run.has_targets) == ((), {}, None)
    named = " ".join(run.problems)
    assert all(name in named for name in ("decisions", "attempts", "targets", "settings"))


def test_reports_have_kind_rank_and_headline(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for name in ("oom/rank-1-1.txt", "hang-rank-0-1.txt", "exits/rank-0-killed.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"headline of {name}\n\n" + "text\n" * 50_000)

    reports = read_run(folder).reports

    assert [(each.kind, each.rank) for each in reports] == [
        ("out_of_memory", 1),
        ("hang", 0),
        ("exit", 0),
    ]
    assert reports[1].headline == "headline of hang-rank-0-1.txt"
    assert len(reports[1].text) <= 64 * 1024


def test_the_steps_of_a_restart_follow_those_of_the_first_attempt(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ranks=1, steps=10)
    log = folder / "rank-0.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    repeated = [line.replace(b'"attempt":0', b'"attempt":1') for line in lines[5:]]
    log.write_bytes(b"".join(lines + repeated))

    run = read_run(folder)

    assert run.ranks[0].column("step").tolist() == [*range(1, 11), *range(6, 11)]
    assert run.ranks[0].column("attempt").tolist() == [0] * 10 + [1] * 5
    assert run.problems == []


def test_a_long_run_has_several_steps_per_row_and_exact_totals(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        read = step % 7 == 0
        return replace(
            step_record(step, seconds=float(step)),
            memory_bytes={"cpu": {"allocated": float(step)}} if read else {},
        )

    folder = write_run(tmp_path / "run", ranks=1, steps=1003, record=record)
    exact = read_run(folder).ranks[0]

    folded = read_run(folder, max_values=3000).ranks[0]

    assert folded.steps_per_row > 5
    assert folded.num_rows == -(-1003 // folded.steps_per_row)
    assert folded.num_rows * len(folded.columns) < 4000
    assert folded.totals == exact.totals
    assert folded.totals["seconds"].maximum == 1003
    assert folded.column("step")[0] == folded.steps_per_row
    assert folded.column("seconds")[0] == pytest.approx((folded.steps_per_row + 1) / 2)
    assert np.nanmax(folded.column("memory.cpu.allocated")) == 1001
    assert folded.column("phase.forward") == pytest.approx(0.1)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b")

    with pytest.raises(RunFolderError, match="no folder"):
        read_run(tmp_path / "missing")
    with pytest.raises(RunFolderError, match=r"2 runs.*b"):
        read_run(tmp_path / "runs")
    with pytest.raises(RunFolderError, match="holds no run"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema", None),
        ("schema", "1"),
        ("step", 2**63 + 5),
        ("step", -1),
        ("ended_at_unix_seconds", None),
        ("ended_at_unix_seconds", 1e18),
        ("seconds", None),
        ("world_size", "many"),
        ("world_size", 2**63 - 1),
        ("loss", [1.0]),
        ("phase_seconds", {"forward": [1.0]}),
        ("collectives", {"all_reduce": {"calls": [1]}}),
        ("local_rank", None),
        ("host", 3),
    ],
)
@pytest.mark.parametrize("place", [0, 3, 9])
def test_a_record_with_a_value_of_another_type_is_left_out_and_counted(
    tmp_path: Path, field: str, value: object, place: int
) -> None:
    folder = write_run(tmp_path / "run", ranks=1)
    log = folder / "rank-0.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    records[place][field] = value
    log.write_text("".join(f"{json.dumps(record)}\n" for record in records))

    run = read_run(folder)

    assert run.ranks[0].num_steps == 9
    assert run.problems[0] == "rank-0.jsonl: 1 damaged line(s) are left out"


def test_a_log_that_is_rotated_while_it_is_read_loses_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run", ranks=1, steps=30)
    current, first, second = (folder / f"rank-0{age}.jsonl" for age in ("", ".1", ".2"))
    lines = current.read_bytes().splitlines(keepends=True)
    first.write_bytes(b"".join(lines[:15]))
    current.write_bytes(b"".join(lines[15:]))
    list_segments = run_reader._segments

    def rotated_after_listing(folder: Path) -> object:
        segments = list_segments(folder)
        first.rename(second)
        current.rename(first)
        current.write_bytes(b"")
        return segments

    monkeypatch.setattr(run_reader, "_segments", rotated_after_listing)

    run = read_run(folder)

    assert run.ranks[0].column("step").tolist() == list(range(1, 31))


def test_a_log_that_is_deleted_while_it_is_read_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run")
    list_segments = run_reader._segments

    def deleted_after_listing(folder: Path) -> object:
        segments = list_segments(folder)
        (folder / "rank-0.jsonl").unlink()
        return segments

    monkeypatch.setattr(run_reader, "_segments", deleted_after_listing)

    run = read_run(folder)

    assert list(run.ranks) == [1]
    assert "no steps of 1 of 2 ranks: 0" in run.problems
