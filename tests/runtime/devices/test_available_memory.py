"""Tests of `available_memory.py`: the first limit that is reached counts."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from zerowatch.runtime.devices import available_memory as module
from zerowatch.runtime.devices.available_memory import available_host_bytes

KIB, MIB = 2**10, 2**20
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def machine(root: Path, available_kib: int, cgroup: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
    (root / "proc/self/status").write_text("Name:\tx\nVmSize:\t 9000 kB\nVmData:\t 3000 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def group(root: Path, name: str, **files: object) -> None:
    folder = root / "sys/fs/cgroup" / name
    folder.mkdir(parents=True)
    for file, content in files.items():
        (folder / file.replace("memory_", "memory.", 1)).write_text(f"{content}\n")


@pytest.mark.parametrize(
    "place",
    [
        {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        {"LOCAL_RANK": "1", "LOCAL_SIZE": "2"},
        {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    ],
)
def test_the_ranks_of_a_node_share_its_memory_under_each_launcher(
    monkeypatch: pytest.MonkeyPatch, place: dict[str, str]
) -> None:
    monkeypatch.setattr(os, "environ", place)
    monkeypatch.setattr(module, "available_host_bytes", lambda: 2**30)

    assert module.available_rank_bytes() == 2**29


def test_without_limits_it_is_what_the_machine_has_left(tmp_path: Path) -> None:
    assert available_host_bytes(machine(tmp_path, 5000, "")) == 5000 * KIB


def test_file_cache_of_a_control_group_can_be_reclaimed(tmp_path: Path) -> None:
    root = machine(tmp_path, 5000, "0::/job\n")
    stat = f"anon 1\ninactive_file {150 * KIB}\nactive_file {50 * KIB}\nshmem 7"
    group(root, "job", memory_max=900 * KIB, memory_current=800 * KIB, memory_stat=stat)

    assert available_host_bytes(root) == 300 * KIB


def test_the_smallest_room_of_a_group_and_its_parents_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, 5000, "0::/pod/job\n")
    group(root, "pod", memory_max=700 * KIB, memory_current=600 * KIB)
    group(root, "pod/job", memory_max="max", memory_current=500 * KIB)

    assert available_host_bytes(root) == 100 * KIB


def test_groups_of_version_one_are_read(tmp_path: Path) -> None:
    root = machine(tmp_path, 5000, "4:memory:/job\n")
    limits = {"memory_limit_in_bytes": 900 * KIB, "memory_usage_in_bytes": 850 * KIB}
    stat = f"inactive_file 3\ntotal_inactive_file {7 * KIB}\ntotal_active_file {3 * KIB}"
    group(root, "memory/job", **limits, memory_stat=stat)

    assert available_host_bytes(root) == 60 * KIB


def test_a_group_above_its_limit_has_nothing_left(tmp_path: Path) -> None:
    root = machine(tmp_path, 5000, "0::/job\n")
    group(root, "job", memory_max=100, memory_current=101)

    assert available_host_bytes(root) == 0


def test_nothing_that_can_be_read_means_no_known_limit(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path) == float("inf")


@pytest.mark.parametrize(("limit", "used"), [("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")])
def test_a_limit_of_this_process_counts(limit: str, used: str) -> None:
    code = (
        "import re, resource\n"
        "from pathlib import Path\n"
        "from zerowatch.runtime.devices.available_memory import available_host_bytes\n"
        "status = Path('/proc/self/status').read_text()\n"
        f"used = 1024 * int(re.search(r'{used}:\\s+(\\d+)', status)[1])\n"
        f"resource.setrlimit(resource.{limit}, (used + {100 * MIB}, resource.RLIM_INFINITY))\n"
        "print(available_host_bytes())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert 50 * MIB < float(done.stdout) <= 100 * MIB


@pytest.mark.parametrize(
    ("kind", "limit", "left"),
    [
        (resource.RLIMIT_AS, 9700, 700),
        (resource.RLIMIT_AS, 8000, 0),
        (resource.RLIMIT_DATA, 3300, 300),
    ],
)
def test_a_limit_of_this_process_leaves_what_it_has_not_used(
    kind: int, limit: int, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlimited = resource.RLIM_INFINITY
    limits = {resource.RLIMIT_AS: unlimited, resource.RLIMIT_DATA: unlimited, kind: limit * KIB}
    monkeypatch.setattr(resource, "getrlimit", lambda each: (limits[each], unlimited))

    assert available_host_bytes(machine(tmp_path, 5000, "")) == left * KIB
