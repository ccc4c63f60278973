"""The host's memory from a /proc and from limits that are scripted.

`test_memory_probes.py` reads this machine's own.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Mapping
from pathlib import Path

import pytest

from zerowatch.runtime.devices.host_memory import HostLimit, HostMemory

KIB = 2**10
STATUS = "Name:\tx\nVmSize:\t 9000 kB\nVmHWM:\t 5000 kB\nVmRSS:\t 4000 kB\nVmData:\t 3000 kB\n"
FILES = "RssAnon:\t 2500 kB\nRssFile:\t 1200 kB\nRssShmem:\t  300 kB\n"  # the parts of VmRSS
UNLIMITED = resource.RLIM_INFINITY


def machine(root: Path, status: str = STATUS, meminfo: str = "MemTotal:  70000 kB\n") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/status").write_text(status)
    (root / "proc/self/clear_refs").touch()
    (root / "proc/self/cgroup").write_text("0::/job\n")
    (root / "proc/meminfo").write_text(meminfo)
    (root / "sys/fs/cgroup/job").mkdir(parents=True)
    return root


def limit_process(monkeypatch: pytest.MonkeyPatch, limits: Mapping[int, int]) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], UNLIMITED))


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    limit_process(monkeypatch, dict.fromkeys(kinds, UNLIMITED))


def test_the_sizes_of_the_process_are_in_bytes(tmp_path: Path) -> None:
    assert HostMemory(reset_peak=False, root=machine(tmp_path)).read() == {
        "allocated": 4000 * KIB,
        "reserved": 9000 * KIB,
        "peak_allocated": 5000 * KIB,
        "limit": 70000 * KIB,
    }


def test_the_pages_of_mapped_files_are_not_memory_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {resource.RLIMIT_AS: 9700 * KIB, resource.RLIMIT_DATA: UNLIMITED}
    limit_process(monkeypatch, limits)

    assert HostMemory(reset_peak=False, root=machine(tmp_path, STATUS + FILES)).read() == {
        "allocated": 2800 * KIB,  # shared memory is in use
        "reserved": 9000 * KIB,
        "peak_allocated": 3800 * KIB,
        "limit": 3500 * KIB,  # what is in use and the 700 that remain
    }


@pytest.mark.parametrize(
    ("before", "now", "peak"),
    [
        (1200, 1900, 3100),  # mapped in between: 5000 - 1900
        (1900, 1200, 3100),  # dropped in between: 5000 - 1900
        (1200, 3000, 2800),  # at least what is in use now
    ],
)
def test_the_peak_leaves_out_the_larger_number_of_file_pages(
    before: int, now: int, peak: int, tmp_path: Path
) -> None:
    def status(file: int) -> str:
        parts = FILES.replace("1200", str(file))
        return STATUS.replace("4000", str(2800 + file)) + parts

    root = machine(tmp_path, status(before))
    probe = HostMemory(reset_peak=False, root=root)
    probe.read()
    (root / "proc/self/status").write_text(status(now))

    readings = probe.read()

    assert (readings["allocated"], readings["peak_allocated"]) == (2800 * KIB, peak * KIB)


def test_a_status_with_a_long_line_of_groups_is_read_whole(tmp_path: Path) -> None:
    groups = "Groups:\t" + "100001 " * 2000 + "\nVmSize:"
    root = machine(tmp_path, STATUS.replace("VmSize:", groups))

    assert HostMemory(reset_peak=False, root=root).read()["allocated"] == 4000 * KIB


def test_the_peak_mark_is_reset_at_the_start_and_after_each_reading(tmp_path: Path) -> None:
    root = machine(tmp_path)
    mark = root / "proc/self/clear_refs"
    probe = HostMemory(reset_peak=True, root=root)

    resets = [mark.read_text()]
    mark.write_text("")
    probe.read()
    resets.append(mark.read_text())

    assert resets == ["5", "5"]
    assert probe.own_peaks


def test_without_reset_the_peak_mark_is_left_alone(tmp_path: Path) -> None:
    root = machine(tmp_path)
    probe = HostMemory(reset_peak=False, root=root)

    probe.read()

    assert (root / "proc/self/clear_refs").read_text() == ""
    assert not probe.own_peaks


def test_a_peak_mark_that_the_kernel_refuses_is_given_up_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not permitted")

    probe = HostMemory(reset_peak=True, root=machine(tmp_path))
    monkeypatch.setattr(os, "pwrite", refuse)
    caplog.set_level(logging.INFO)

    peaks = [probe.read()["peak_allocated"] for _ in range(3)]

    assert (peaks, probe.own_peaks) == ([5000 * KIB] * 3, False)
    assert caplog.messages == [
        "peak RSS is that of the whole process, not of each step: not permitted"
    ]
    probe.close()


@pytest.mark.parametrize(
    ("kind", "limit"),
    # 4000 KiB are in use; 9000 count for the first limit, and 3000 for the second.
    [(resource.RLIMIT_AS, 9700), (resource.RLIMIT_DATA, 3700)],
)
def test_a_limit_of_the_process_is_reached_at_what_is_in_use_plus_what_remains(
    kind: int, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {resource.RLIMIT_AS: UNLIMITED, resource.RLIMIT_DATA: UNLIMITED, kind: limit * KIB}
    limit_process(monkeypatch, limits)

    probe = HostMemory(reset_peak=False, root=machine(tmp_path))

    assert probe.read()["limit"] == 4700 * KIB


def test_a_limit_is_read_again_after_ten_seconds_and_every_ten_from_then_on(tmp_path: Path) -> None:
    file = machine(tmp_path) / "sys/fs/cgroup/job/memory.max"
    file.write_text("5000\n")
    seconds = [30.0]
    limit = HostLimit(tmp_path, now=lambda: seconds[0])

    found = []
    for moment, content in ((39.9, "6000"), (40.0, "7000"), (49.9, "8000"), (50.0, "max")):
        seconds[0] = moment
        file.write_text(content)
        found.append(limit.in_use_bytes(in_use=0, virtual=0, data=0))

    assert found == [5000, 7000, 7000, 70000 * KIB]


def test_a_control_group_that_was_removed_limits_nothing(tmp_path: Path) -> None:
    file = machine(tmp_path) / "sys/fs/cgroup/job/memory.max"
    file.write_text("5000\n")
    seconds = [0.0]
    limit = HostLimit(tmp_path, now=lambda: seconds[0])

    file.unlink()
    seconds[0] = 11.0

    assert limit.in_use_bytes(in_use=0, virtual=0, data=0) == 70000 * KIB


def test_a_machine_that_does_not_tell_its_memory_has_no_limit(tmp_path: Path) -> None:
    limit = HostLimit(machine(tmp_path, meminfo="MemFree: 1 kB\n"))

    assert limit.in_use_bytes(in_use=3, virtual=5, data=7) == float("inf")
