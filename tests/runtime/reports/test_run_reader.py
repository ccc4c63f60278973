"""Tests of reading a run folder: values as written, and what is said about damaged parts."""

from __future__ import annotations

import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closed_folders import refuse_below
from recorded_runs import STARTED, elastic_run, run_of_attempts, step_record, write_run

from zerowatch.metrics.step_record import CollectiveTotals, GenerationTotals, StepRecord
from zerowatch.runtime.monitor import step_log
from zerowatch.runtime.reports import run_reader
from zerowatch.runtime.reports.run_reader import (
    FULL_LOG_WORLD_SIZE,
    ColumnTotals,
    RunFolderError,
    number_ranges,
    read_run,
)


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


def test_a_value_that_is_too_large_for_a_column_is_unknown(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return step_record(step, gradient_norm=1e39 if step == 3 else 1.5)

    steps = read_run(write_run(tmp_path / "run", ranks=1, record=record)).ranks[0]

    assert np.flatnonzero(np.isnan(steps.column("gradient_norm"))).tolist() == [2]
    assert steps.totals["gradient_norm"].maximum == 1.5


def test_segments_are_read_from_the_oldest_to_the_newest(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ranks=1, steps=9)
    lines = (folder / "rank-0.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "rank-0.2.jsonl").write_bytes(b"".join(lines[:3]))
    (folder / "rank-0.1.jsonl").write_bytes(b"".join(lines[3:6]))
    (folder / "rank-0.jsonl").write_bytes(b"".join(lines[6:]))

    run = read_run(folder)

    assert run.ranks[0].column("step").tolist() == list(range(1, 10))
    assert run.problems == []


@pytest.mark.parametrize("attempt", [0, 1])
@pytest.mark.parametrize("steps_per_row", [1, 4])
def test_deleted_segments_and_gaps_are_named(
    tmp_path: Path, steps_per_row: int, attempt: int
) -> None:
    folder = write_run(tmp_path / "run", ranks=1, steps=30)
    log = folder / "rank-0.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"attempt":0', b'"attempt":%d' % attempt))
    lines = log.read_bytes().splitlines(keepends=True)
    (folder / "rank-0.1.jsonl").write_bytes(b"".join(lines[10:15]))
    log.write_bytes(b"".join(lines[18:]))
    columns = len(read_run(folder).ranks[0].columns)

    run = read_run(folder, max_values=17 * columns // steps_per_row)

    assert run.ranks[0].steps_per_row >= steps_per_row
    assert run.problems == [
        "rank 0: steps 1 to 10 are missing: older segments of the log were deleted "
        "(run_log.max_segments)",
        "rank 0: 3 steps are missing in the log",
    ]


def test_a_run_with_few_segments_has_begun_with_a_later_step(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run",
        ranks=1,
        record=lambda rank, step: step_record(500 + step),
        settings={"run_log": {"max_segments": 3}},
    )
    lines = (folder / "rank-0.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "rank-0.1.jsonl").write_bytes(b"".join(lines[:5]))
    (folder / "rank-0.jsonl").write_bytes(b"".join(lines[5:]))

    assert read_run(folder).problems == []


def thinned_run(folder: Path, steps: int) -> Path:
    """A run with steps of 5 s, of which rank 1 records every tenth."""
    write_run(
        folder,
        steps=steps,
        record=lambda rank, step: step_record(step, ended_at_unix_seconds=STARTED + 5 * step),
    )
    log = folder / "rank-1.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[9::10]))
    return folder


def test_a_thinned_log_has_no_gaps_and_ends_up_to_nine_steps_before_the_others(
    tmp_path: Path,
) -> None:
    assert read_run(thinned_run(tmp_path / "run", steps=109)).problems == []
    assert read_run(thinned_run(tmp_path / "short", steps=19)).problems == []


def test_records_that_a_thinned_log_lacks_are_counted_once(tmp_path: Path) -> None:
    folder = thinned_run(tmp_path / "run", steps=110)
    log = folder / "rank-1.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:4], *lines[5:10]]))

    assert read_run(folder).problems == [
        "rank 1: 1 steps are missing in the log",
        "rank 1: its log ends with step 100 of 110",
    ]


def test_ranks_that_have_left_an_elastic_job_are_neither_cut_nor_counted(tmp_path: Path) -> None:
    run = read_run(elastic_run(tmp_path / "run"))

    assert (run.world_size, list(run.ranks_at_end), run.problems) == (2, [0, 1], [])


SHRUNK, GROWN = ((72, 100), (64, 300)), ((64, 200), (72, 300))
BACK = ((16, 50), (8, 250), (16, 300))


@pytest.mark.parametrize("noted_after", [-20.0, 0.2])
@pytest.mark.parametrize(
    ("attempts", "chunk_bytes"),
    [(SHRUNK, 2**20), (GROWN, 2**20), (BACK, 2**20), (BACK, 1000)],
)
def test_an_elastic_job_lacks_no_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attempts: tuple[tuple[int, int], ...],
    noted_after: float,
    chunk_bytes: int,
) -> None:
    monkeypatch.setattr(run_reader, "_CHUNK_BYTES", chunk_bytes)
    folder = run_of_attempts(tmp_path / "run", *attempts, noted_after=noted_after)

    assert read_run(folder).problems == []


@pytest.mark.parametrize(
    ("attempts", "rank", "lost", "num_lost"),
    [
        (SHRUNK, 1, [50], 1),
        (SHRUNK, 1, [50, *range(150, 160)], 11),
        (GROWN, 9, [250, *range(150, 160)], 11),
        (BACK, 12, [20, 280, 281], 3),
    ],
)
def test_steps_that_are_missing_within_an_attempt_of_an_elastic_job_are_counted(
    tmp_path: Path, attempts: tuple[tuple[int, int], ...], rank: int, lost: list[int], num_lost: int
) -> None:
    folder = run_of_attempts(tmp_path / "run", *attempts)
    log = folder / f"rank-{rank}.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if json.loads(line)["step"] not in lost))

    assert read_run(folder).problems == [f"rank {rank}: {num_lost} steps are missing in the log"]


@pytest.mark.parametrize("noted_after", [-20.0, 0.2])
@pytest.mark.parametrize(
    ("attempts", "rank", "lost", "num_lost"),
    [
        (((2, 100), (2, 2000), (2, 2100)), 1, range(101, 2001), 1900),
        (((2, 100), (2, 200)), 1, range(1, 101), 100),
        (((2, 100), (2, 200)), 1, range(60, 101), 41),
        (((2, 100), (2, 200)), 1, range(90, 121), 31),
        (((72, 100), (72, 200)), 1, range(55, 145), 9),
        (((72, 100), (72, 200)), 8, range(55, 145), 90),
        (((72, 100), (64, 200)), 1, range(55, 145), 5 + 1 + 44 - 1),
        (BACK, 12, range(40, 51), 11),
        (BACK, 12, range(40, 260), 11 + 9),
    ],
)
def test_steps_that_a_rank_lacks_around_a_restart_are_counted(
    tmp_path: Path,
    attempts: tuple[tuple[int, int], ...],
    rank: int,
    lost: range,
    num_lost: int,
    noted_after: float,
) -> None:
    folder = run_of_attempts(tmp_path / "run", *attempts, noted_after=noted_after)
    log = folder / f"rank-{rank}.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if json.loads(line)["step"] not in lost))

    assert read_run(folder).problems == [f"rank {rank}: {num_lost} steps are missing in the log"]


def test_steps_that_a_rank_has_recorded_before_a_restart_are_not_missing(tmp_path: Path) -> None:
    # The job goes on from the checkpoint of step 50, and after a crash from that of step 100.
    numbers = [*range(1, 101), *range(51, 81), *range(101, 121)]
    folder = write_run(
        tmp_path / "run",
        steps=len(numbers),
        record=lambda rank, place: step_record(
            numbers[place - 1], ended_at_unix_seconds=STARTED + 0.5 * place
        ),
    )
    starts = (0.0, 50.5, 65.5)
    (folder / "attempts.jsonl").write_text(
        "".join(json.dumps({"started_at_unix_seconds": STARTED + at}) + "\n" for at in starts)
    )

    assert read_run(folder).problems == []


def test_a_log_that_ends_early_in_the_last_attempt_of_an_elastic_job_is_named(
    tmp_path: Path,
) -> None:
    folder = run_of_attempts(tmp_path / "run", *BACK)
    log = folder / "rank-12.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:50]))

    assert read_run(folder).problems == ["rank 12: its log ends with step 50 of 300"]


@pytest.mark.parametrize(
    ("attempts", "removed", "problems"),
    [
        (((72, 9),), None, []),
        (((64, 10), (72, 19)), None, []),
        (((64, 10), (72, 19)), 64, ["no steps of 1 of 72 ranks: 64"]),
        (((72, 10),), 9, ["no steps of 1 of 72 ranks: 9"]),
    ],
)
def test_before_the_tenth_step_most_ranks_of_a_large_job_have_no_log(
    tmp_path: Path, attempts: tuple[tuple[int, int], ...], removed: int | None, problems: list[str]
) -> None:
    folder = run_of_attempts(tmp_path / "run", *attempts)
    if removed is not None:
        (folder / f"rank-{removed}.jsonl").unlink()

    assert read_run(folder).problems == problems


@pytest.mark.parametrize(
    ("attempts", "removed", "num_logs"),
    [
        (((72, 9),), [8], 8),
        (((72, 9),), [0], 8),
        (((96, 9),), [8, 24, 32], 9),
        (((72, 9),), [*range(8, 72, 8)], 1),
    ],
)
def test_before_the_tenth_step_it_is_not_certain_which_ranks_lack_a_log(
    tmp_path: Path, attempts: tuple[tuple[int, int], ...], removed: list[int], num_logs: int
) -> None:
    folder = run_of_attempts(tmp_path / "run", *attempts)
    for rank in removed:
        (folder / f"rank-{rank}.jsonl").unlink()

    (problem,) = read_run(folder).problems

    assert problem.startswith(f"logs of {num_logs} of {attempts[-1][0]} ranks")


def test_nodes_of_different_sizes_have_no_rank_that_lacks_a_log_for_certain(tmp_path: Path) -> None:
    folder = run_of_attempts(tmp_path / "run", (72, 9))
    (folder / "rank-16.jsonl").rename(folder / "rank-12.jsonl")  # nodes of 8, 4 and 12 ranks

    (problem,) = read_run(folder).problems

    assert problem.startswith("logs of 9 of 72 ranks")


@pytest.mark.parametrize("world_size", [64, 65])
def test_the_ranks_with_thinned_logs_are_those_that_the_step_log_thins(
    tmp_path: Path, world_size: int
) -> None:
    run = read_run(run_of_attempts(tmp_path / "run", (world_size, 40)))

    assert FULL_LOG_WORLD_SIZE == step_log.FULL_LOG_WORLD_SIZE
    for rank, steps in run.ranks.items():
        assert steps.is_thinned is not step_log.keeps_every_step(world_size, rank % 8)
        assert steps.usual_gap == (step_log.THINNED_EVERY if steps.is_thinned else 1)


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


def test_a_folder_that_cannot_be_searched_hides_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "runs" / "a")
    closed = write_run(tmp_path / "runs" / "b")
    refuse_below(monkeypatch, closed)

    with pytest.raises(RunFolderError, match=r"holds 1 run; .*a"):
        read_run(tmp_path / "runs")
    with pytest.raises(RunFolderError, match="b cannot be read: Permission denied"):
        read_run(closed)


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


def test_steps_that_are_recorded_while_other_ranks_are_read_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run", ranks=3, steps=20)
    longer = write_run(tmp_path / "longer" / "run", ranks=3, steps=200)
    read_rank = run_reader._read_rank

    def with_later_steps(rank: int, *arguments: Any) -> object:
        """Read a rank; meanwhile the next one records 90 s of steps, and begins another segment."""
        steps = read_rank(rank, *arguments)
        log = folder / f"rank-{rank + 1}.jsonl"
        if log.exists():
            lines = (longer / log.name).read_bytes().splitlines(keepends=True)
            with log.open("ab") as file:
                file.writelines(lines[20:150])
                file.write(lines[150][:40])  # a part of a line
            log.rename(folder / f"rank-{rank + 1}.1.jsonl")
            log.write_bytes(b"".join(lines[150:]))
        return steps

    monkeypatch.setattr(run_reader, "_read_rank", with_later_steps)

    run = read_run(folder)

    assert run.problems == []
    assert [steps.num_steps for steps in run.ranks.values()] == [20] * 3


def test_a_full_log_that_is_rotated_while_other_ranks_are_read_has_no_later_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest segment is deleted, and the file system gives its inode to the new one."""
    folder = run_of_attempts(tmp_path / "run", (2, 60), (2, 300))
    (folder / "settings.json").write_text('{"run_log": {"max_segments": 3}}')
    for rank in range(2):
        lines = (folder / f"rank-{rank}.jsonl").read_bytes().splitlines(keepends=True)
        for age, first, last in ((".2", 20, 80), (".1", 80, 150), ("", 150, 200)):
            (folder / f"rank-{rank}{age}.jsonl").write_bytes(b"".join(lines[first:last]))
    read_rank = run_reader._read_rank

    def with_a_rotation(rank: int, *arguments: Any) -> object:
        steps = read_rank(rank, *arguments)
        if rank == 0:
            new, first, second = (folder / f"rank-1{age}.jsonl" for age in ("", ".1", ".2"))
            spare = second.rename(folder / "spare")
            first.rename(second)
            new.rename(first)
            spare.write_bytes(b"".join(lines[200:220]))
            spare.rename(new)
        return steps

    monkeypatch.setattr(run_reader, "_read_rank", with_a_rotation)

    run = read_run(folder)

    assert [int(steps.column("step")[-1]) for steps in run.ranks.values()] == [200, 200]
    assert [problem.split(" are missing: ")[0] for problem in run.problems] == [
        "rank 0: steps 1 to 20",
        "rank 1: steps 1 to 80",
    ]


def test_a_line_that_is_being_written_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run", ranks=1, steps=20)
    log = folder / "rank-0.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole[:-40])
    opened = run_reader._opened

    def with_its_end(*arguments: Any) -> object:
        with log.open("ab") as file:
            file.write(whole[-40:])
        return opened(*arguments)

    monkeypatch.setattr(run_reader, "_opened", with_its_end)

    run = read_run(folder)

    assert run.problems == []
    assert run.ranks[0].num_steps == 19


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


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([4], "4"), ([4, 5], "4 to 5"), ([1, 3, 4, 5, 7, 9, 10], "1, 3 to 5, 7, 9 to 10")],
)
def test_numbers_are_named_by_their_ranges(numbers: list[int], text: str) -> None:
    assert number_ranges(numbers) == text


@pytest.mark.parametrize(
    ("seconds", "problems"),
    [(30.0, []), (30.5, ["rank 0: its log ends with step 9 of 10"])],
)
def test_a_log_may_end_half_a_minute_before_those_of_other_ranks(
    tmp_path: Path, seconds: float, problems: list[str]
) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return step_record(step, ended_at_unix_seconds=STARTED + (seconds if step == 10 else 0))

    folder = write_run(tmp_path / "run", record=record)
    log = folder / "rank-0.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:9]))

    assert read_run(folder).problems == problems


def test_the_smallest_and_largest_values_and_the_mean_are_of_the_known_ones(
    tmp_path: Path,
) -> None:
    losses = {1: 4.0, 2: None, 3: -2.0, 4: 7.0}
    folder = write_run(
        tmp_path / "run", steps=4, record=lambda rank, step: step_record(step, loss=losses[step])
    )

    steps = read_run(folder).ranks[0]

    assert steps.totals["loss"] == ColumnTotals(sum=9.0, count=3, minimum=-2.0, maximum=7.0)
    assert steps.totals["loss"].mean == 3.0
    assert ColumnTotals().mean is None


def test_each_column_of_a_record_is_read(tmp_path: Path) -> None:
    totals = CollectiveTotals(calls=2, payload_bytes=30, wire_bytes=40.0, seconds=0.5)
    generated = GenerationTotals(
        calls=1,
        sequences=8,
        tokens=256,
        seconds=2.5,
        collectives=12,
        gathers=3,
        gathered_bytes=4096,
        peak_bytes={},
    )

    def record(rank: int, step: int) -> StepRecord:
        return step_record(
            step,
            seconds=4.0,
            micro_batches=3,
            samples=24,
            tokens=512,
            loss=2.5,
            nonfinite_loss=True,
            gradient_norm=1.25,
            learning_rate=0.5,
            loss_scale=1024.0,
            skipped=True,
            comm_seconds=0.75,
            comm_exposed_seconds=0.25,
            comm_exposed_phase_seconds={"forward": 0.25},
            phase_seconds={"forward": 1.5},
            collectives={"all_reduce": totals},
            memory_bytes={"cuda:0": {"allocated": 5.0, "limit": 8.0}},
            device_readings={"cuda:0": {"power_watts": 300.0}},
            oom_risk_ratio={"cuda:0": 0.125},
            generation=generated,
        )

    steps = read_run(write_run(tmp_path / "run", steps=2, record=record)).ranks[1]

    assert {name: values[1] for name, values in steps.columns.items()} == {
        "step": 2,
        "ended_at": STARTED + 1,
        "seconds": 4,
        "attempt": 0,
        "world_size": 2,
        "micro_batches": 3,
        "samples": 24,
        "tokens": 512,
        "loss": 2.5,
        "nonfinite_loss": 1,
        "gradient_norm": 1.25,
        "learning_rate": 0.5,
        "loss_scale": 1024,
        "skipped": 1,
        "comm_seconds": 0.75,
        "comm_exposed_seconds": 0.25,
        "phase.forward": 1.5,
        "comm_exposed.forward": 0.25,
        "collective.all_reduce.calls": 2,
        "collective.all_reduce.payload_bytes": 30,
        "collective.all_reduce.wire_bytes": 40,
        "collective.all_reduce.seconds": 0.5,
        "memory.cuda:0.allocated": 5,
        "memory.cuda:0.limit": 8,
        "device.cuda:0.power_watts": 300,
        "oom_risk.cuda:0": 0.125,
        "generation.calls": 1,
        "generation.sequences": 8,
        "generation.tokens": 256,
        "generation.seconds": 2.5,
        "generation.collectives": 12,
        "generation.gathered_bytes": 4096,
    }
    assert (steps.rank, steps.local_rank, steps.host, steps.world_size) == (1, 1, "node-0", 2)
    assert (steps.num_steps, steps.num_rows, steps.steps_per_row) == (2, 2, 1)


def test_a_row_of_several_steps_has_means_of_times_and_the_highest_memory(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return step_record(
            step,
            seconds=float(step),
            loss=None if step % 2 else float(step),
            oom_risk_ratio={"cpu": 0.5 / step},
            memory_bytes={"cpu": {"allocated": 100.0 - step}} if step > 4 else {},
        )

    folder = write_run(tmp_path / "run", ranks=1, steps=10, record=record)
    columns = len(read_run(folder).ranks[0].columns)

    steps = read_run(folder, max_values=4 * columns).ranks[0]

    assert (steps.steps_per_row, steps.num_steps, steps.num_rows) == (3, 10, 4)
    assert steps.column("step").tolist() == [3, 6, 9, 10]
    assert steps.column("ended_at").tolist() == [STARTED + at for at in (1.5, 3, 4.5, 5)]
    assert steps.column("seconds").tolist() == [2, 5, 8, 10]
    assert steps.column("loss").tolist() == [2, 5, 8, 10]
    assert steps.column("oom_risk.cpu").tolist() == pytest.approx([0.5, 0.125, 0.5 / 7, 0.05])
    memory = steps.column("memory.cpu.allocated")
    assert np.isnan(memory[0]) and memory[1:].tolist() == [95, 93, 90]


@pytest.mark.parametrize(("number", "is_cut"), [(50, False), (51, True)])
def test_the_last_fifty_reports_of_a_kind_are_read(
    tmp_path: Path, number: int, is_cut: bool
) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "exits").mkdir()
    for at in range(number):
        path = folder / f"exits/rank-{at}-killed.txt"
        path.write_text("killed")
        os.utime(path, (STARTED + at, STARTED + at))

    run = read_run(folder)

    assert [report.rank for report in run.reports] == list(range(number))[-50:]
    assert run.problems == (["only the last 50 of 51 exit reports"] if is_cut else [])


def test_the_last_ten_thousand_decisions_are_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "decisions.jsonl").write_text("".join(f'{{"n":{n}}}\n' for n in range(10_001)))

    run = read_run(folder)

    assert len(run.decisions) == 10_000
    assert (run.decisions[0], run.decisions[-1]) == ({"n": 1}, {"n": 10_000})
    assert run.problems == ["decisions.jsonl: only the last 10000 decisions are read"]


def test_a_log_of_another_version_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ranks=1)
    log = folder / "rank-0.jsonl"
    log.write_text(log.read_text().replace('"schema":1', '"schema":2'))

    assert read_run(folder).problems == [
        "rank-0.jsonl has the schema 2 instead of 1: it is of another version of zerowatch, and "
        "may be misread"
    ]


def test_records_of_two_runs_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    log = folder / "rank-1.jsonl"
    log.write_text(log.read_text().replace('"run_id":"run"', '"run_id":"other"'))

    run = read_run(folder)

    assert run.run_id == "run"
    assert run.problems == ["the records have several run ids: run, other"]


def test_ranks_with_liveness_files_are_not_closed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for rank in ("10", "2", "x", "3-5feceb66"):  # the last is of a rank that went on elsewhere
        (folder / f"rank-{rank}.alive.json").write_text("{}")
    (folder / "targets.json").write_text('[{"targets": []}]')

    run = read_run(folder)

    assert (run.unclosed, run.has_targets) == ((2, 10), True)


def test_an_upper_bound_of_one_step_is_one_of_the_rank(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run",
        record=lambda rank, step: step_record(
            step, comm_seconds_is_upper_bound=rank == 1 and step == 5
        ),
    )

    assert [steps.is_upper_bound for steps in read_run(folder).ranks.values()] == [False, True]


@pytest.mark.parametrize("name", ["hang-rank-0-1.txt", "metrics-0.jsonl", "run.lock"])
def test_a_folder_with_any_file_of_a_run_is_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()

    assert read_run(tmp_path).run_id == tmp_path.name
