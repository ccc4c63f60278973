"""Tests of memory probes: the host against real allocations and limits, CUDA with a fake.

Covers `cgroups.py`.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from mmap import PROT_READ, mmap
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fakes.cuda_memory import FakeCudaMemory

from zerowatch.metrics.catalog.memory import MEMORY_PEAK, MEMORY_STATES
from zerowatch.runtime.common.accelerator import CudaAccelerator
from zerowatch.runtime.devices.cuda_allocator import CudaMemory
from zerowatch.runtime.devices.host_memory import HostLimit, HostMemory
from zerowatch.runtime.devices.memory_probes import PortableMemory, memory_probes

MIB = 2**20
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

STATUS = "Name:\tx\nVmSize:\t 9000 kB\nVmHWM:\t 5000 kB\nVmRSS:\t 4000 kB\nVmData:\t 3000 kB\n"

# Readings by their names in a probe: uses, peaks and the limit.
PEAKS = {f"peak_{state}" for state in MEMORY_PEAK.labels[1].values}
SERVED = {*MEMORY_STATES, *PEAKS, "limit"}


def machine(root: Path, cgroups: str = "", physical_kib: int = 16 * 2**20) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/status").write_text(STATUS)
    (root / "proc/self/clear_refs").touch()
    (root / "proc/self/cgroup").write_text(cgroups)
    (root / "proc/meminfo").write_text(f"MemTotal:   {physical_kib} kB\nMemFree: 1 kB\n")
    return root


def cgroup_limit(root: Path, group: str, name: str, limit: object) -> None:
    folder = root / "sys/fs/cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"{limit}\n")


def limit_of(root: Path) -> float:
    return HostLimit(root).in_use_bytes(in_use=0, virtual=0, data=0)


def touch(num_bytes: int) -> bytearray:
    return bytearray(b"\x01") * num_bytes


def test_the_host_is_read_on_every_rank_and_all_its_states_are_in_the_catalog() -> None:
    (probe,) = memory_probes(device_index=None, reset_peak=True)

    readings = probe.read()

    assert probe.device == "cpu"
    assert set(readings) == {"allocated", "peak_allocated", "reserved", "limit"}
    assert set(readings) <= SERVED


def test_a_rank_on_a_gpu_reads_its_gpu_too() -> None:
    probes = memory_probes(device_index=1, reset_peak=True)

    assert [probe.device for probe in probes] == ["cpu", "cuda:1"]


def test_memory_in_use_grows_by_what_was_allocated_and_touched() -> None:
    probe = HostMemory(reset_peak=True)
    before = probe.read()["allocated"]

    block = touch(200 * MIB)
    grown = probe.read()["allocated"] - before

    assert len(block) == 200 * MIB
    assert grown == pytest.approx(200 * MIB, abs=4 * MIB)


def test_a_mapped_file_that_was_read_is_not_memory_in_use() -> None:
    file = Path(torch.__file__).parent / "lib/libtorch_cpu.so"  # on a disk, as tmpfs is memory
    probe = HostMemory(reset_peak=True)
    before = probe.read()["allocated"]

    with file.open("rb") as opened, mmap(opened.fileno(), 64 * MIB, prot=PROT_READ) as data:
        assert sum(data[at] for at in range(0, len(data), 4096))
        readings = probe.read()

    assert readings["allocated"] - before < 8 * MIB
    assert readings["peak_allocated"] - before < 8 * MIB


def test_a_peak_that_is_freed_again_shows_in_one_reading_only() -> None:
    probe = HostMemory(reset_peak=True)
    before = probe.read()["allocated"]

    touch(200 * MIB)  # freed at once
    during, after = probe.read(), probe.read()

    assert during["peak_allocated"] - before == pytest.approx(200 * MIB, abs=4 * MIB)
    assert during["allocated"] - before < 4 * MIB
    assert after["peak_allocated"] - before < 4 * MIB


def test_without_reset_a_peak_stays_in_later_readings() -> None:
    probe = HostMemory(reset_peak=False)
    before = probe.read()["allocated"]

    touch(200 * MIB)  # freed at once
    probe.read()

    assert probe.read()["peak_allocated"] - before > 196 * MIB


def test_a_peak_that_cannot_be_reset_is_logged_once_and_reading_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = machine(tmp_path)
    (root / "proc/self/clear_refs").unlink()

    with caplog.at_level(logging.INFO):
        probe = HostMemory(reset_peak=True, root=root)
        readings = [probe.read()["peak_allocated"] for _ in range(3)]

    assert readings == [5000 * 1024] * 3
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "peak RSS is that of the whole process, not of each step"
    ]


def test_a_proc_without_a_peak_leaves_the_peak_out(tmp_path: Path) -> None:
    root = machine(tmp_path)
    (root / "proc/self/status").write_text(STATUS.replace("VmHWM:\t 5000 kB\n", ""))

    readings = HostMemory(reset_peak=True, root=root).read()

    assert set(readings) == {"allocated", "reserved", "limit"}
    assert readings["allocated"] == 4000 * 1024


def test_a_collected_probe_closes_its_files() -> None:
    open_before = len(list(Path("/proc/self/fd").iterdir()))

    probes = [HostMemory(reset_peak=True) for _ in range(20)]
    open_between = len(list(Path("/proc/self/fd").iterdir()))
    del probes

    assert open_between == open_before + 40
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


LIMITED_CHILD = """
import mmap, resource, sys
from zerowatch.runtime.devices.host_memory import HostMemory

kind, margin = getattr(resource, sys.argv[1]), 300 * 2**20
untouched = mmap.mmap(-1, 200 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
in_use = {line.split(":")[0]: int(line.split()[1]) * 1024
          for line in open("/proc/self/status") if line.startswith("Vm")}
used = in_use["VmSize" if sys.argv[1] == "RLIMIT_AS" else "VmData"]
resource.setrlimit(kind, (used + margin, resource.RLIM_INFINITY))
probe = HostMemory(reset_peak=True)
limit = probe.read()["limit"]
blocks = []
try:
    while True:
        blocks.append(mmap.mmap(-1, 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        blocks[-1].write(bytes(2**20))
except OSError:
    print(limit, probe.read()["allocated"])
"""


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_resource_limit_reads_as_the_memory_in_use_at_which_allocation_fails(kind: str) -> None:
    output = subprocess.run(
        [sys.executable, "-c", LIMITED_CHILD, kind], capture_output=True, text=True, check=True
    ).stdout

    limit, in_use_at_failure = map(float, output.split())

    assert limit == pytest.approx(in_use_at_failure, abs=8 * MIB)


def test_without_other_limits_physical_memory_is_the_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, physical_kib=4 * 2**20)

    assert limit_of(root) == 4 * 2**30


def test_the_real_machine_s_limit_is_no_more_than_its_memory() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024

    assert 0 < HostMemory(reset_peak=False).read()["limit"] <= total


def test_the_limit_of_a_version_2_cgroup_is_read(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/job.slice/rank0\n")
    cgroup_limit(root, "job.slice/rank0", "memory.max", 2 * 2**30)
    cgroup_limit(root, "job.slice", "memory.max", "max")

    assert limit_of(root) == 2 * 2**30


def test_a_smaller_limit_of_a_parent_cgroup_is_read(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/job.slice/rank0\n")
    cgroup_limit(root, "job.slice/rank0", "memory.max", "max")
    cgroup_limit(root, "job.slice", "memory.max", 3 * 2**30)

    assert limit_of(root) == 3 * 2**30


def test_the_limit_of_a_sibling_cgroup_is_ignored(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/job\n")
    cgroup_limit(root, "job", "memory.max", "max")
    cgroup_limit(root, "neighbor", "memory.max", 2**30)

    assert limit_of(root) == 16 * 2**30


def test_the_limit_of_a_version_1_cgroup_is_read_and_its_maximum_means_none(tmp_path: Path) -> None:
    root = machine(tmp_path, "5:cpuset,memory:/job/rank0\n1:cpu:/other\n")
    cgroup_limit(root, "memory/job/rank0", "memory.limit_in_bytes", 9223372036854771712)
    assert limit_of(root) == 16 * 2**30

    cgroup_limit(root, "memory/job", "memory.limit_in_bytes", 2**30)

    assert limit_of(root) == 2**30


def test_inside_a_container_the_mount_itself_is_the_cgroup(tmp_path: Path) -> None:
    root = machine(tmp_path, "5:memory:/docker/4f6\n")
    cgroup_limit(root, "memory", "memory.limit_in_bytes", 2**30)

    assert limit_of(root) == 2**30


def test_the_new_limit_of_a_resized_container_is_read_within_ten_seconds(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n")
    cgroup_limit(root, "", "memory.max", 2 * 2**30)
    seconds = [0.0]
    limit = HostLimit(root, now=lambda: seconds[0])

    cgroup_limit(root, "", "memory.max", 2**30)
    seconds[0] = 10.0

    assert limit.in_use_bytes(in_use=0, virtual=0, data=0) == 2**30


def test_cuda_readings_are_those_of_the_allocator() -> None:
    cuda = FakeCudaMemory(free=30, total=80)
    cuda.current |= {"allocated_bytes": 5, "reserved_bytes": 10, "inactive_split_bytes": 2}
    cuda.current["active_bytes"] = 6  # a freed byte, for which the allocator waits if it must
    cuda.peak |= {"allocated_bytes": 8, "reserved_bytes": 12, "inactive_split_bytes": 4}
    cuda.retries = 3

    readings = CudaMemory(0, cuda).read()

    assert readings == {
        "allocated": 5,
        "reserved": 10,
        "peak_allocated": 8,
        "peak_reserved": 12,
        "inactive_split": 2,
        "unusable": 2,
        "limit": 40,
        "alloc_retries": 3,
    }
    assert set(readings) - {"alloc_retries", "unusable"} == SERVED


def test_a_smaller_memory_fraction_of_the_process_is_the_limit() -> None:
    cuda = FakeCudaMemory(free=70, total=80, share=0.5)

    assert CudaMemory(0, cuda).read()["limit"] == 40


def test_the_limit_is_read_from_the_driver_every_ten_seconds_only() -> None:
    cuda = FakeCudaMemory(free=30, total=80)
    seconds = [0.0]
    probe = CudaMemory(0, cuda, now=lambda: seconds[0])

    calls = []
    for now in (0.0, 1.0, 9.9, 10.0):
        seconds[0] = now
        probe.read()
        calls.append(cuda.info_calls)

    assert calls == [1, 1, 1, 2]


@pytest.mark.parametrize("shortage", ["ooms", "retries"])
def test_after_a_shortage_of_memory_the_limit_is_read_at_once(shortage: str) -> None:
    cuda = FakeCudaMemory(free=30, total=80)
    probe = CudaMemory(0, cuda, now=lambda: 0.0)
    before = probe.read()["limit"]

    cuda.free = 10  # another process has taken 20
    setattr(cuda, shortage, 1)
    limits = [probe.read()["limit"] for _ in range(2)]

    assert (before, limits) == (30, [10, 10])
    assert cuda.info_calls == 2


def test_a_new_memory_fraction_is_the_limit_at_once() -> None:
    cuda = FakeCudaMemory(free=70, total=80)
    probe = CudaMemory(0, cuda, now=lambda: 0.0)
    before = probe.read()["limit"]

    cuda.share = 0.25

    assert (before, probe.read()["limit"]) == (70, 20)


def test_with_expandable_segments_no_free_memory_is_unusable() -> None:
    cuda = FakeCudaMemory(free=70, total=80)
    cuda.current["inactive_split_bytes"] = 2
    cuda.expandable = True

    readings = CudaMemory(0, cuda).read()

    assert (readings["inactive_split"], readings["unusable"]) == (2, 0)


class Graph:
    """Stands for a captured graph."""


@pytest.mark.parametrize(("expandable", "in_pieces"), [(False, 2), (True, 0)])
def test_what_is_free_in_the_pools_of_captured_graphs_is_unusable(
    expandable: bool, in_pieces: int
) -> None:
    cuda = FakeCudaMemory(free=70, total=80)
    cuda.current["inactive_split_bytes"], cuda.pool_bytes, cuda.expandable = 2, 5, expandable
    seconds = [0.0]
    probe = CudaMemory(0, cuda, now=lambda: seconds[0])

    def unusable(now: float) -> float:
        seconds[0] = now
        return probe.read()["unusable"]

    before = unusable(0.0)
    first, second = Graph(), Graph()
    cuda.captured_graphs |= {id(each): each for each in (first, second)}
    captured = unusable(10.0)
    cuda.pool_bytes = 3  # one graph is freed
    del second
    one_freed = unusable(20.0)
    del first

    assert (before, captured, one_freed) == (in_pieces, in_pieces + 5, in_pieces + 3)
    assert unusable(30.0) == in_pieces
    assert cuda.num_snapshots == 2


def test_the_pools_of_graphs_are_read_only_if_graphs_have_changed_and_after_a_shortage() -> None:
    cuda = FakeCudaMemory(free=70, total=80)
    graph = Graph()
    cuda.captured_graphs[id(graph)] = graph
    seconds = [0.0]
    probe = CudaMemory(0, cuda, now=lambda: seconds[0])

    reads = []
    for now, retries in ((0.0, 0), (1.0, 0), (20.0, 0), (21.0, 1), (22.0, 1)):
        seconds[0], cuda.retries = now, retries
        probe.read()
        reads.append(cuda.num_snapshots)

    assert reads == [1, 1, 1, 2, 2]


def test_the_pools_are_read_every_ten_seconds_at_most_if_each_step_is_short_of_memory() -> None:
    cuda = FakeCudaMemory(free=70, total=80)
    graph = Graph()
    cuda.captured_graphs[id(graph)] = graph
    seconds = [0.0]
    probe = CudaMemory(0, cuda, now=lambda: seconds[0])

    reads = []
    for now, retries in ((0.0, 0), (1.0, 1), (9.0, 9), (10.0, 9), (19.0, 9), (25.0, 9), (50.0, 9)):
        seconds[0], cuda.retries = now, retries
        probe.read()
        reads.append(cuda.num_snapshots)

    assert reads == [1, 1, 1, 1, 2, 2, 2]


def test_the_pools_are_read_again_if_a_new_graph_has_the_id_of_a_freed_one() -> None:
    cuda = FakeCudaMemory(free=70, total=80)
    graph = Graph()
    cuda.captured_graphs[7] = graph
    seconds = [0.0]
    probe = CudaMemory(0, cuda, now=lambda: seconds[0])
    probe.read()

    del graph
    graph = Graph()  # CPython places it where the first one was
    cuda.captured_graphs[7] = graph
    seconds[0] = 10.0
    probe.read()

    assert cuda.num_snapshots == 2


def test_the_pools_are_read_again_if_a_graph_was_reset_or_has_captured_again() -> None:
    cuda = FakeCudaMemory(free=70, total=80)
    graph, seconds = Graph(), [0.0]
    probe = CudaMemory(0, cuda, now=lambda: seconds[0])

    def unusable(pool_bytes: int) -> float:
        cuda.pool_bytes = pool_bytes
        seconds[0] += 10
        return probe.read()["unusable"]

    cuda.captured_graphs[id(graph)] = graph
    captured = unusable(5)
    cuda.captured_graphs.pop(id(graph))  # reset, and captured again at once
    cuda.captured_graphs[id(graph)] = graph
    captured_again = unusable(40)
    cuda.captured_graphs.pop(id(graph))

    assert (captured, captured_again, unusable(40)) == (5, 40, 0)


def segment(device: int = 0, pool: tuple[int, int] = (0, 1), **changes: Any) -> dict[str, Any]:
    sizes = {"total_size": 100, "allocated_size": 0, "active_size": 0, "is_expandable": False}
    return {"device": device, "segment_pool_id": pool, **sizes, **changes}


@pytest.mark.parametrize("has_option", [True, False])
def test_free_bytes_of_private_pools_are_those_that_torch_does_not_count_as_split(
    monkeypatch: pytest.MonkeyPatch, has_option: bool
) -> None:
    in_use = {"allocated_size": 30, "active_size": 30}
    segments = [
        segment(),
        segment(pool=(0, 0)),  # the allocator returns it before it fails
        segment(device=1),
        segment(**in_use),  # inactive_split_bytes has its free part
        segment(is_expandable=True, **in_use),
    ]
    read = []

    def with_option(include_traces: bool = True) -> list[dict[str, Any]]:
        read.append(include_traces)
        return segments

    snapshot = with_option if has_option else lambda: segments
    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)

    assert CudaAccelerator().private_pool_bytes(0) == 170
    assert read == ([False] if has_option else [])


def test_an_allocator_without_segments_has_no_private_pools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def snapshot() -> None:
        raise RuntimeError("Calling snapshot with backend:cudaMallocAsync is not meaningful")

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)

    assert CudaAccelerator().private_pool_bytes(0) == 0


@pytest.mark.parametrize(
    ("settings", "expandable"),
    [
        ("", False),
        ("expandable_segments:False", False),
        ("max_split_size_mb:64, expandable_segments: True", True),
    ],
)
def test_expandable_segments_are_read_from_the_settings_of_the_allocator(
    monkeypatch: pytest.MonkeyPatch, settings: str, expandable: bool
) -> None:
    accelerator = CudaAccelerator()
    getter = "_accelerator_getAllocatorSettings"
    monkeypatch.setattr(torch._C, getter, lambda: settings, raising=False)
    now = accelerator.has_expandable_segments()

    monkeypatch.delattr(torch._C, getter)  # torch before 2.9
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)

    assert [now, accelerator.has_expandable_segments()] == [expandable] * 2


def test_a_gpu_not_yet_in_use_reads_nothing_and_is_not_initialized() -> None:
    cuda = FakeCudaMemory(free=30, total=80)
    cuda.initialized = False

    assert CudaMemory(0, cuda).read() == {}
    assert cuda.info_calls == 0


def test_a_closed_probe_has_no_file_open_and_reads_nothing() -> None:
    probe = HostMemory(reset_peak=True)
    opened = own_files()
    probe.close()
    probe.close()

    assert len(opened) - len(own_files()) == 2
    assert probe.read() == {}


def own_files() -> list[str]:
    """Return the open files of /proc/self that a probe reads and writes."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [link for link in links if link.endswith(("/status", "/clear_refs"))]


def test_without_proc_the_rss_is_read_and_an_error_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    probe = PortableMemory()
    read = probe.read()

    def fail(process: psutil.Process) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "memory_info", fail)

    assert read["allocated"] > 10 * MIB
    assert [probe.read(), probe.read()] == [{}, {}]
    assert len(caplog.records) == 1
