"""Tests of the check that keeps tests from waiting for a lock of a killed job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from extension_locks import STARTING_SECONDS, complaint, stale_locks

LONG_AGO = STARTING_SECONDS + 3600


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """A lock that is an hour old."""
    lock = tmp_path / "py311_cpu" / "fused_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    made_at = lock.stat().st_mtime - LONG_AGO
    os.utime(lock, (made_at, made_at))
    return lock


def test_a_lock_where_nobody_compiles_is_named_with_what_to_do(lock: Path, tmp_path: Path) -> None:
    assert stale_locks(tmp_path) == [lock]
    assert f"rm {lock}" in complaint([lock])


def test_a_lock_where_a_compiler_works_is_left(lock: Path, tmp_path: Path) -> None:
    compiler = subprocess.Popen(
        [sys.executable, "-c", "input()"], cwd=lock.parent, stdin=subprocess.PIPE
    )
    try:
        assert stale_locks(tmp_path) == []
    finally:
        compiler.communicate()


def test_a_lock_whose_holder_may_not_have_started_its_compiler_is_left(
    lock: Path, tmp_path: Path
) -> None:
    os.utime(lock)

    assert stale_locks(tmp_path) == []


def test_a_folder_that_does_not_exist_has_no_lock(tmp_path: Path) -> None:
    assert stale_locks(tmp_path / "nothing") == []


def test_a_test_of_a_job_fails_at_once_and_names_the_lock(lock: Path, tmp_path: Path) -> None:
    job = Path(__file__).parent / "runtime" / "monitor" / "test_killed_rank.py"
    variables = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(job)]

    ended = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env=variables,
        capture_output=True,
        text=True,
        timeout=600,
    )

    assert ended.returncode == 1
    assert f"rm {lock}" in ended.stdout
