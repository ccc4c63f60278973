"""Tests of the name of the host's limit, with a fake /proc and with the real /proc."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from zerowatch.runtime.devices.host_memory import HostMemory
from zerowatch.runtime.memory.oom.evidence import host_limit_name

MIB = 2**20
STATES = {"allocated": 1000.0 * MIB, "reserved": 4000.0 * MIB}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a machine of 16 GiB, a cgroup of 8, 6000 MiB of addresses and 5000 of data."""
    rows = {"Max data size": 5000 * MIB, "Max address space": 6000 * MIB}
    for name, text in {
        "proc/self/limits": "".join(f"{k:<26}{v:<21}{v:<21}bytes\n" for k, v in rows.items()),
        "proc/self/status": f"VmData:\t{1500 * 1024} kB\n",
        "proc/self/cgroup": "0::/job\n",
        "proc/meminfo": f"MemTotal:       {16 * 2**20} kB\n",
        "sys/fs/cgroup/job/memory.max": f"{8 * 2**30}\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


LIMITS = {
    3000: "RLIMIT_AS (ulimit -v) of 5.86 GiB of addresses",  # 1000 + 6000 - 4000
    4500: "RLIMIT_DATA (ulimit -d) of 4.88 GiB",  # 1000 + 5000 - 1500
    16384: "this machine's memory",
    777: "an unknown limit",
}


@pytest.mark.parametrize("limit", LIMITS)
def test_the_limit_that_a_reading_was_computed_from_is_named(limit: int, root: Path) -> None:
    states = {**STATES, "limit": float(limit * MIB)}

    assert host_limit_name(states, root) == LIMITS[limit]


def test_a_cgroup_is_named_with_its_folder(root: Path) -> None:
    states = {**STATES, "limit": 8.0 * 2**30}

    assert host_limit_name(states, root) == f"the memory cgroup {root}/sys/fs/cgroup/job"


def test_a_real_limit_on_addresses_is_named_from_a_real_reading() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    memory = HostMemory(reset_peak=False)
    size = int(memory.read()["reserved"])

    resource.setrlimit(resource.RLIMIT_AS, (size + 512 * MIB, before[1]))
    try:
        name = host_limit_name(HostMemory(reset_peak=False).read())
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

    assert name.startswith("RLIMIT_AS (ulimit -v) of ")
