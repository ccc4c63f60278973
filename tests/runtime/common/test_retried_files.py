"""Tests of small files that are written later if the disk is full or the folder is missing."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from zerowatch.runtime.common.retried_files import RetriedFiles


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", "zerowatch.runtime.common.retried_files")
    return caplog


def test_a_file_is_written_at_once_with_its_mode(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    files = RetriedFiles()

    files.write(tmp_path / "a", "one")
    files.write(tmp_path / "b", "two", mode=0o600)
    (tmp_path / "a").write_text("changed since")
    files.retry()

    assert [(tmp_path / name).read_text() for name in "ab"] == ["changed since", "two"]
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"]
    assert modes == [0o644, 0o600]
    assert log.messages == []


def test_the_last_content_of_a_file_is_written_once_its_folder_can_be_made(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    files, path = RetriedFiles(), tmp_path / "later" / "a"
    path.parent.touch()  # a file, so that no folder can be made

    files.write(path, "first", mode=0o600)
    files.write(path, "last", mode=0o640)
    files.retry()
    missing = log.messages[:]
    path.parent.unlink()
    files.retry()

    assert path.read_text() == "last"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert len(missing) == 1 and missing[0].startswith(f"cannot write {path}: ")
    assert log.messages[1:] == [f"{path} is written now"]


def test_a_file_that_was_discarded_is_not_written(tmp_path: Path) -> None:
    files, path = RetriedFiles(), tmp_path / "later" / "a"
    path.parent.touch()  # a file, so that no folder can be made

    files.write(path, "text")
    files.discard(path)
    files.discard(tmp_path / "never written")
    path.parent.unlink()
    files.retry()

    assert not path.exists()
