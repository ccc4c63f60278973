"""Tests of the liveness file, and of who counts as exited, in trees of files like /proc.

The report that the next start makes of such files is tested in `test_killed_ranks.py`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from zerowatch.runtime.common.liveness_file import (
    LivenessFile,
    OomKillCounts,
    ProcessMarker,
    count_oom_kills_in,
    current_process,
    has_exited,
    read_marker,
)

MARKER = ProcessMarker(
    rank=3,
    host="node-0",
    pid=77,
    start_ticks=220,
    boot_id="this-boot",
    pid_namespace="pid:[7]",
    started_at_unix_seconds=1000.5,
    kills=OomKillCounts(host=5),
)


def write_stat(root: Path, pid: int, state: str = "S") -> None:
    """Write the file of a process, in which field n of proc_pid_stat(5) has the value 10 n."""
    fields = " ".join(str(10 * number) for number in range(4, 53))
    (root / f"proc/{pid}").mkdir(parents=True, exist_ok=True)
    (root / f"proc/{pid}/stat").write_text(f"{pid} (a) name (x)) {state} {fields}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("this-boot\n")
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[7]")
    (tmp_path / "proc/vmstat").write_text("pgfault 12\noom_kill 5\n")
    return tmp_path


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[int]:
    """A lock on a file, as a living process holds it on its liveness file."""
    descriptor = os.open(tmp_path / "locked", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield descriptor
    os.close(descriptor)


def test_the_marker_of_this_process_has_its_start_and_the_counters(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.5)
    write_stat(root, os.getpid())

    assert current_process(3, "node-0", root) == replace(MARKER, pid=os.getpid())


@pytest.mark.parametrize(
    ("state", "exited"), [("R", False), ("S", False), ("D", False), ("T", False), ("Z", True)]
)
def test_a_process_has_exited_once_it_is_a_zombie(root: Path, state: str, exited: bool) -> None:
    write_stat(root, 77, state)

    assert has_exited(MARKER, root / "none", root) is exited


@pytest.mark.parametrize(
    "marker",
    [replace(MARKER, pid=78), replace(MARKER, start_ticks=219), replace(MARKER, boot_id="before")],
    ids=["no such id", "another process of this id", "another boot"],
)
def test_a_process_that_is_no_longer_there_has_exited(root: Path, marker: ProcessMarker) -> None:
    write_stat(root, 77)

    assert has_exited(marker, root / "none", root)


def test_the_lock_decides_about_a_process_of_another_pid_namespace(root: Path, lock: int) -> None:
    write_stat(root, 77)
    elsewhere = replace(MARKER, pid_namespace="pid:[8]")
    (root / "free").touch()

    assert not has_exited(elsewhere, root / "locked", root)
    assert has_exited(elsewhere, root / "free", root)


def test_the_lock_decides_about_a_process_of_another_boot(
    root: Path, lock: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be alive on another machine of this name, which a shared folder shows."""
    elsewhere = replace(MARKER, boot_id="that-boot")
    (root / "free").touch()

    alive, left = (has_exited(elsewhere, root / name, root) for name in ("locked", "free"))

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert (alive, left) == (False, True)
    assert has_exited(elsewhere, root / "free", root)


def test_a_marker_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(json.dumps(asdict(MARKER)))

    assert read_marker(tmp_path / "a") == MARKER


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", "[" * 60_000, json.dumps(asdict(MARKER) | {"kills": {"gpu": 1}})],
    ids=["empty", "half", "list", "no fields", "nested", "other version"],
)
def test_an_incomplete_marker_or_one_of_another_version_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").write_text(text)

    assert read_marker(tmp_path / "a") is None
    assert read_marker(tmp_path / "missing") is None


@pytest.mark.parametrize(("file", "inode"), [(None, None), ("gone/memory.events", None)])
def test_without_the_cgroup_only_the_kills_of_the_host_are_counted(
    root: Path, file: str | None, inode: int | None
) -> None:
    name = None if file is None else str(root / file)

    counts = count_oom_kills_in(name, root)

    assert counts == OomKillCounts(host=5, cgroup_file=name, cgroup_inode=inode, cgroup=None)


def test_a_file_of_an_earlier_process_is_replaced_and_an_open_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.alive.json"
    path.write_text("of an earlier process")
    file = LivenessFile(tmp_path, 0, "node-0")

    file.open()
    inode = path.stat().st_ino
    file.open()

    assert read_marker(path) is not None
    assert path.stat().st_ino == inode
    file.close()


def test_the_file_of_another_host_is_kept_by_another_name(tmp_path: Path) -> None:
    LivenessFile(tmp_path, 0, "node-0").open()  # its process is killed
    left = read_marker(tmp_path / "rank-0.alive.json")

    file = LivenessFile(tmp_path, 0, "node-1")
    file.open()

    markers = {path.name: read_marker(path) for path in tmp_path.glob("rank-*.alive.json")}
    now = markers.pop("rank-0.alive.json")
    assert now is not None
    assert now.host == "node-1"
    assert list(markers.values()) == [left]
    file.close()
    assert {path.name for path in tmp_path.iterdir()} == set(markers)


def test_the_start_may_be_earlier_than_the_file(tmp_path: Path) -> None:
    LivenessFile(tmp_path, 0, "node-0", began_unix_seconds=123.5).open()

    written = read_marker(tmp_path / "rank-0.alive.json")

    assert written is not None
    assert written.started_at_unix_seconds == 123.5


def test_an_open_file_is_locked_until_it_is_closed(root: Path) -> None:
    write_stat(root, os.getpid())
    file = LivenessFile(root / "run", 0, "node-0", root)
    path = root / "run" / "rank-0.alive.json"

    file.open()
    marker = read_marker(path)
    assert marker is not None
    elsewhere = replace(marker, pid_namespace="pid:[8]")
    while_open = has_exited(elsewhere, path, root)
    os.link(path, root / "link")
    file.close()

    assert not while_open
    assert has_exited(elsewhere, root / "link", root)


def test_a_file_that_cannot_be_written_is_logged_once_until_it_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").touch()  # where the folder should be
    file = LivenessFile(tmp_path / "run", 0, "node-0")

    file.open()
    file.open()
    while_missing = file.is_missing
    (tmp_path / "run").unlink()
    file.open()
    written = file.is_missing
    file.close()

    assert (while_missing, written) == (True, False)
    (line,) = caplog.messages
    assert line.startswith(f"liveness file {tmp_path}/run/rank-0.alive.json cannot be written: ")


def test_half_a_file_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "write", lambda descriptor, text: len(text) - 1)
    file = LivenessFile(tmp_path, 0, "node-0")

    file.open()

    assert file.is_missing
    assert list(tmp_path.iterdir()) == []
    assert "the disk is full" in caplog.text


def test_without_proc_no_file_is_written(tmp_path: Path) -> None:
    file = LivenessFile(tmp_path / "run", 0, "node-0", root=tmp_path)

    file.open()

    assert not file.is_missing
    assert list(tmp_path.iterdir()) == []
