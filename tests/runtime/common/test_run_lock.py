"""Tests of the lock of a run folder: `run_lock.py`."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.locked_file import locked_by_another_process

from zerowatch.metrics.atomic_file import open_to_append
from zerowatch.metrics.file_lock import LOCK_FILE
from zerowatch.runtime.common.run_lock import is_locked, lock, unlock


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    descriptor = open_to_append(tmp_path / LOCK_FILE)
    yield descriptor
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def is_locked_elsewhere(folder: Path) -> bool:
    """Whether another process finds the folder locked."""
    script = (
        "import sys; from pathlib import Path\n"
        "from zerowatch.runtime.common.run_lock import is_locked\n"
        "print(is_locked(Path(sys.argv[1])))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True
    )
    return answer.stdout == "True\n"


def test_a_process_does_not_lose_its_lock_by_asking_for_it(tmp_path: Path, descriptor: int) -> None:
    assert not is_locked(tmp_path)
    assert lock(descriptor)

    assert is_locked(tmp_path)
    assert is_locked_elsewhere(tmp_path)

    unlock(descriptor)
    assert not is_locked(tmp_path)
    assert not is_locked_elsewhere(tmp_path)


def test_a_forked_child_asks_for_the_lock_of_its_parent(tmp_path: Path, descriptor: int) -> None:
    assert lock(descriptor)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reader, 1)  # the parent has released its lock by then
        os._exit(int(is_locked(tmp_path)))
    unlock(descriptor)
    os.write(writer, b"1")

    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    os.close(reader)
    os.close(writer)


def test_a_file_that_another_process_has_locked_is_not_locked(
    tmp_path: Path, descriptor: int
) -> None:
    with locked_by_another_process(tmp_path / LOCK_FILE):
        assert not lock(descriptor)
        assert is_locked(tmp_path)

    os.close(descriptor)
    assert not is_locked(tmp_path)


@pytest.mark.parametrize("was_locked", [True, False])
def test_a_stale_file_of_a_network_file_system_is_closed_and_no_longer_locked(
    tmp_path: Path, descriptor: int, was_locked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    if was_locked:
        lock(descriptor)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", stale)
        patch.setattr(fcntl, "lockf", stale)

        assert lock(descriptor)
        assert is_locked(tmp_path) == was_locked
        unlock(descriptor)

    assert not is_locked(tmp_path)


def test_a_folder_without_the_file_is_not_locked(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
