"""Tests of how this user's files are distinguished from those of others in a shared folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from fakes.foreign_files import forbid_to_write, give_away

from zerowatch.runtime.common.own_files import MAX_BYTES, is_foreign_folder, read_own_file


def test_a_small_file_of_this_user_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * MAX_BYTES)

    assert read_own_file(tmp_path / "a") == b"x" * MAX_BYTES


@pytest.mark.parametrize("kind", ["FIFO", "link", "device", "folder", "large", "missing"])
def test_anything_else_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    (tmp_path / "other").write_text("{}")
    make = {
        "FIFO": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(tmp_path / "other"),
        "device": lambda: path.symlink_to("/dev/zero"),
        "folder": path.mkdir,
        "large": lambda: path.write_bytes(b"x" * (MAX_BYTES + 1)),
        "missing": lambda: None,
    }
    make[kind]()

    with pytest.raises(OSError, match="a'"):
        read_own_file(path)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").touch()
    give_away(monkeypatch, tmp_path / "a")

    with pytest.raises(PermissionError, match="another user"):
        read_own_file(tmp_path / "a")


def test_a_file_system_may_map_the_id_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("own")
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)  # as NFS maps root

    assert read_own_file(tmp_path / "a") == b"own"
    assert not is_foreign_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_is_foreign_if_it_is_another_users_or_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, foreign = tmp_path / "closed", tmp_path / "foreign"
    closed.mkdir()
    foreign.mkdir()
    own = is_foreign_folder(closed)
    forbid_to_write(monkeypatch, closed)
    is_closed = is_foreign_folder(closed)

    def refuse(dir: Path) -> None:
        raise PermissionError(str(dir))

    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)

    assert (own, is_closed, is_foreign_folder(foreign)) == (False, True, True)
    assert not is_foreign_folder(tmp_path / "missing")
