"""Tests of the notes on how processes exited: whose they are, and which are not reported yet."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from fakes.foreign_files import give_away

from zerowatch.runtime.common.exit_notes import (
    ExitNote,
    error_note,
    read_exit_notes,
    unreported_notes,
    write_exit_note,
)
from zerowatch.runtime.common.liveness_file import OomKillCounts, ProcessMarker

HANG = ExitNote(text="ended itself", may_be_oom_kill=False)
KILL = ExitNote(text="was the first to exit, by SIGKILL", may_be_oom_kill=True)


def process(rank: int, pid: int = 77, start_ticks: int = 5) -> ProcessMarker:
    return ProcessMarker(
        rank=rank,
        host="node-0",
        pid=pid,
        start_ticks=start_ticks,
        boot_id="boot",
        pid_namespace="pid:[1]",
        started_at_unix_seconds=1000.0,
        kills=OomKillCounts(),
    )


def test_the_notes_of_a_process_are_read_by_author(tmp_path: Path) -> None:
    write_exit_note(tmp_path, process(3), "launcher", KILL)
    write_exit_note(tmp_path, process(3), "hang", HANG)

    assert read_exit_notes(tmp_path, process(3)) == [HANG, KILL]
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*")}
    assert names == {"exits/rank-3-77-5-hang.note.json", "exits/rank-3-77-5-launcher.note.json"}


@pytest.mark.parametrize(
    "other", [process(2), process(3, pid=7), process(3, start_ticks=50)], ids=["rank", "id", "time"]
)
def test_notes_of_another_process_are_not_read(tmp_path: Path, other: ProcessMarker) -> None:
    write_exit_note(tmp_path, other, "hang", HANG)

    assert read_exit_notes(tmp_path, process(3)) == []


def test_a_note_replaces_the_last_one_of_its_author(tmp_path: Path) -> None:
    for note in (HANG, KILL):
        write_exit_note(tmp_path, process(3), "hang", note)

    assert read_exit_notes(tmp_path, process(3)) == [KILL]


def test_a_note_replaces_a_link_and_only_its_user_can_read_it(tmp_path: Path) -> None:
    precious, path = tmp_path / "train.py", tmp_path / "exits" / "rank-3-77-5-launcher.note.json"
    precious.write_text("precious")
    path.parent.mkdir()
    path.symlink_to(precious)

    write_exit_note(tmp_path, process(3), "launcher", KILL)

    assert precious.read_text() == "precious"
    assert path.lstat().st_mode == stat.S_IFREG | 0o600
    assert read_exit_notes(tmp_path, process(3)) == [KILL]


@pytest.mark.parametrize("other", ["foreign", "unreadable", "damaged"])
def test_an_error_note_of_another_user_or_that_cannot_be_read_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        write_exit_note(
            folder, process(3), "error", ExitNote(text=folder.name, may_be_oom_kill=False)
        )
    note = folders[0] / "exits" / "rank-3-77-5-error.note.json"
    if other == "foreign":
        give_away(monkeypatch, note)
    elif other == "unreadable":
        note.unlink()
        note.symlink_to(note)
    else:
        note.write_text('{"text"')

    assert error_note(folders, 3, 77, 0.0) == "two"
    assert error_note(folders[:1], 3, 77, 0.0) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"text": "x"}', '{"text": "x", "more": 1}'])
def test_a_note_that_is_incomplete_or_of_another_version_is_skipped(
    tmp_path: Path, text: str
) -> None:
    write_exit_note(tmp_path, process(3), "launcher", KILL)
    (tmp_path / "exits" / "rank-3-77-5-hang.note.json").write_text(text)

    assert read_exit_notes(tmp_path, process(3)) == [KILL]


def test_a_process_without_a_report_is_listed_by_its_first_note(tmp_path: Path) -> None:
    for one, author in ((process(12), "launcher"), (process(3), "launcher"), (process(3), "hang")):
        write_exit_note(tmp_path, one, author, HANG)
    write_exit_note(tmp_path, process(4), "hang", HANG)
    exits = tmp_path / "exits"
    (exits / "rank-4-77-5.life.json").touch()  # its liveness file, moved by the report
    (exits / "rank-x-1-2-hang.note.json").touch()

    assert unreported_notes(tmp_path) == {
        exits / "rank-12-77-5-launcher.note.json": 12,
        exits / "rank-3-77-5-hang.note.json": 3,
    }


def test_without_notes_nothing_is_unreported(tmp_path: Path) -> None:
    assert unreported_notes(tmp_path) == {}
    assert read_exit_notes(tmp_path, process(0)) == []
