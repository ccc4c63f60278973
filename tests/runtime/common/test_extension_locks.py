"""Tests of the locks of torch's extensions: where they lie, how old they are, who holds them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from zerowatch.runtime.common import extension_locks
from zerowatch.runtime.common.extension_locks import (
    BuildLock,
    awaited_lock,
    build_locks,
    extensions_root,
    lock_at,
)


class Process:
    """A process as psutil lists it."""

    def __init__(self, pid: int, cwd: Path | None, *opened: Path) -> None:
        self.pid = pid
        files = [self.__class__(0, None) for _ in opened]
        for file, path in zip(files, opened, strict=True):
            file.path = str(path)
        self.info = {"cwd": None if cwd is None else str(cwd), "open_files": files or None}

    path: str


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "lock"
    path.touch()
    return path


@pytest.mark.parametrize(
    ("seconds", "age"),
    [
        (None, "0 min 0 s"),
        (59.9, "0 min 59 s"),
        (61.0, "1 min 1 s"),
        (3599.0, "59 min 59 s"),
        (3600.0, "1 h 0 min"),
        (11_100.0, "3 h 5 min"),
    ],
)
def test_the_age_of_a_lock_is_put_into_words(seconds: float | None, age: str) -> None:
    assert BuildLock(path=Path("lock"), age_seconds=seconds).age == age


@pytest.mark.parametrize(
    ("variables", "root"),
    [
        ({"TORCH_EXTENSIONS_DIR": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/torch_extensions"),
        ({"TORCH_EXTENSIONS_DIR": "", "XDG_CACHE_HOME": ""}, "/home/ann/.cache/torch_extensions"),
        ({}, "/home/ann/.cache/torch_extensions"),
    ],
)
def test_the_folder_of_extensions_is_that_of_torch(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], root: str
) -> None:
    for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/ann"} | variables).items():
        monkeypatch.setenv(name, value)

    assert extensions_root() == Path(root)


def test_locks_are_found_one_and_two_folders_below_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension_locks.psutil, "process_iter", lambda _: [])
    for place in ("lock", "b/lock", "a/c/lock", "a/c/d/lock", "a/other"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()

    found = [each.path.relative_to(tmp_path).as_posix() for each in build_locks(tmp_path)]

    assert found == ["a/c/lock", "b/lock"]


def test_the_age_counts_from_when_the_lock_was_made(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(lock, (5000.0, 5000.0))
    monkeypatch.setattr(extension_locks.psutil, "process_iter", lambda _: [])

    ages = []
    for now in (5007.0, 4999.0):  # the second time the clock was set back
        monkeypatch.setattr(time, "time", lambda now=now: now)
        ages.append(lock_at(lock).age_seconds)

    assert ages == [7.0, 0.0]


def test_a_lock_that_was_just_released_has_no_age_and_no_builders(tmp_path: Path) -> None:
    path = tmp_path / "lock"

    assert lock_at(path) == BuildLock(path=path, age_seconds=None, builders=())


def test_builders_hold_the_lock_open_or_work_in_its_folder(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = lock.parent.resolve()
    elsewhere = Path("/elsewhere")
    processes = [
        Process(os.getpid(), folder, lock),  # this process waits
        Process(11, folder),
        Process(12, elsewhere, folder / "other", folder / "lock"),
        Process(13, elsewhere, folder / "other"),
        Process(14, None),  # of another user
    ]
    monkeypatch.setattr(extension_locks.psutil, "process_iter", lambda _: processes)

    assert lock_at(lock).builders == (11, 12)


def test_a_process_that_waits_for_something_else_waits_for_no_lock() -> None:
    assert awaited_lock() is None
