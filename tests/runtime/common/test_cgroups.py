"""Tests of the folders with the limits of a control group, in trees of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerowatch.runtime.common.cgroups import cgroup_folders

VERSION_1 = "12:pids:/other\n4:cpu,memory:/job/rank\n1:name=systemd:/x\n"


@pytest.mark.parametrize(
    ("controller", "lines", "folders"),
    [
        ("memory", "0::/job/rank\n", ["job/rank", "job", "."]),
        ("memory", "0::/\n", ["."]),
        ("memory", VERSION_1, ["memory/job/rank", "memory/job", "memory"]),
        ("cpu", VERSION_1, ["cpu/job/rank", "cpu/job", "cpu"]),
        ("pids", VERSION_1 + "0::/both\n", ["pids/other", "pids", "both", "."]),
        ("io", VERSION_1, []),
        ("memory", "0::/a:b\n", ["a:b", "."]),
    ],
)
def test_the_folders_of_a_controller_are_listed_from_the_innermost_to_the_mount_point(
    tmp_path: Path, controller: str, lines: str, folders: list[str]
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(lines)

    found = cgroup_folders(controller, tmp_path)

    assert found == [tmp_path / "sys/fs/cgroup" / folder for folder in folders]


def test_without_proc_there_are_no_folders(tmp_path: Path) -> None:
    assert cgroup_folders("memory", tmp_path) == []
