"""Tests of report files: who may read them, what is never overwritten, how they are named."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from zerowatch.runtime.common.report_files import (
    create_first_free,
    create_private,
    display_path,
    times_in,
    utc_text,
    write_or_warn,
)


def test_only_the_owner_can_read_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "report"

    descriptor = create_private(path)
    os.write(descriptor, b"text")
    os.close(descriptor)

    assert path.read_text() == "text"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_first_free_file_is_created_and_no_other_is_changed(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c", "d")]
    for path in paths[:2]:
        path.write_text("earlier")

    created = create_first_free(paths)

    assert created is not None
    os.close(created[1])
    assert created[0] == paths[2]
    assert [path.read_text() for path in paths[:3]] == ["earlier", "earlier", ""]
    assert not paths[3].exists()
    assert create_first_free(paths[:3]) is None


def test_a_missing_folder_is_an_error_rather_than_a_reason_to_try_the_next(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        create_first_free([tmp_path / "none" / "a", tmp_path / "b"])


def test_a_time_is_written_in_utc() -> None:
    assert utc_text(1_700_000_000.9) == "2023-11-14 22:13:20 UTC"


def test_a_path_is_shown_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    assert display_path(tmp_path / "work" / "runs" / "one") == "runs/one"
    assert display_path(tmp_path / "other") == str(tmp_path / "other")


def test_a_small_file_is_replaced_with_its_mode_or_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, mode in (("a", {}), ("b", {"mode": 0o600})):
        (tmp_path / name).write_text("longer than the new text")
        write_or_warn(tmp_path / name, "new", **mode)
    written = caplog.messages[:]
    write_or_warn(tmp_path / "a" / "c", "new")  # below a file

    assert [(tmp_path / name).read_text() for name in "ab"] == ["new", "new"]
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"]
    assert modes == [0o644, 0o600]
    assert written == []
    (line,) = caplog.messages
    assert line.startswith(f"cannot write {tmp_path}/a/c: ")


@pytest.mark.parametrize(
    ("text", "times"),
    [
        (f"rank 0 on host, {utc_text(1.79e9)}\nstarted {utc_text(1e9)}", [1.79e9, 1e9]),
        ("rank 0 on host, 2026-02-31 00:00:00 UTC", []),
        ("no time", []),
    ],
)
def test_the_times_in_a_report_can_be_read(text: str, times: list[float]) -> None:
    assert times_in(text) == times
