"""Tests of what the launcher prints and notes on the exits of ranks.

Notes in a run folder are in `tests/runtime/memory/oom/test_killed_ranks.py`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from zerowatch.runtime.cli.launcher_notes import (
    ended_ranks,
    running_local_ranks,
    worker_pids,
    write_notes,
)


def failures(**codes: tuple[int, float]) -> dict[int, SimpleNamespace]:
    """Exit codes and times by rank, such as rank_3=(1, 7.0)."""
    return {
        int(name.removeprefix("rank_")): SimpleNamespace(exitcode=code, timestamp=at)
        for name, (code, at) in codes.items()
    }


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (
            failures(rank_0=(-15, 9.0), rank_3=(1, 7.0), rank_5=(2, 8.0)),
            "rank 3 was the first rank of this host to fail, with code 1; its own lines say why",
        ),
        (
            failures(rank_2=(0, 7.0)),
            "rank 2 was the first rank of this host to fail, with code 0; its own lines say why",
        ),
        (
            failures(rank_1=(-9, 7.0)),
            "rank 1 was the first rank of this host to fail, by SIGKILL",
        ),
        (
            failures(rank_1=(-40, 7.0)),
            "rank 1 was the first rank of this host to fail, by signal 40",
        ),
    ],
)
def test_the_first_rank_to_exit_is_printed_with_its_code_or_signal(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    found: dict[int, SimpleNamespace],
    line: str,
) -> None:
    write_notes([tmp_path], {rank: 100 + rank for rank in range(6)}, found)

    [printed] = capsys.readouterr().err.splitlines()
    assert printed.startswith(f"zerowatch: {line}")
    assert ("its own lines" in printed) == ("code" in line)


def test_a_rank_has_ended_if_it_did_not_run_when_the_agent_looked_before_the_failure() -> None:
    workers = [SimpleNamespace(global_rank=4 + local, local_rank=local) for local in range(4)]
    group = SimpleNamespace(workers=workers)
    context = SimpleNamespace(_running_local_ranks={0, 3})
    scripts = running_local_ranks(SimpleNamespace(_pcontext=context))
    context._running_local_ranks.clear()  # seen at the same moment as the failure
    functions = running_local_ranks(SimpleNamespace(_pcontext=SimpleNamespace()))
    not_started = running_local_ranks(SimpleNamespace(_pcontext=None))

    assert ended_ranks(group, scripts) == [5, 6]
    assert (ended_ranks(group, functions), ended_ranks(group, not_started)) == ([], [])


def test_the_processes_of_workers_are_by_their_global_rank() -> None:
    workers = [SimpleNamespace(global_rank=rank, local_rank=0, id=70 + rank) for rank in (4, 6)]

    assert worker_pids(SimpleNamespace(workers=workers)) == {4: 74, 6: 76}


def test_the_error_that_the_first_rank_has_noted_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run/exits").mkdir(parents=True)
    note = '{"text": "ended after rank 1 had failed with KeyError", "may_be_oom_kill": false}'
    (tmp_path / "run/exits/rank-0-100-7-error.note.json").write_text(note)

    write_notes([tmp_path], {0: 100, 1: 101}, failures(rank_0=(1, 7.0)))

    [printed] = capsys.readouterr().err.splitlines()
    assert printed == (
        "zerowatch: rank 0 was the first rank of this host to fail, with code 1: "
        "it ended after rank 1 had failed with KeyError"
    )


@pytest.mark.parametrize("own", ["a", "b", "c"])
def test_the_error_of_another_job_is_not_printed_if_the_ranks_have_named_their_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], own: str
) -> None:
    """Ranks in containers that share a folder have the same numbers and small process ids."""
    for run in ("a", "b", "c"):
        (tmp_path / run / "exits").mkdir(parents=True)
        note = f'{{"text": "failed in {run}", "may_be_oom_kill": false}}'
        (tmp_path / run / "exits/rank-0-17-7-error.note.json").write_text(note)
    named = [tmp_path / "elsewhere" / "a", tmp_path / own]

    write_notes([tmp_path], {0: 17}, failures(rank_0=(1, 7.0)), named=named)

    [printed] = capsys.readouterr().err.splitlines()
    assert printed.endswith(f"it failed in {own}")
