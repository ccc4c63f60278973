"""Tests of device probes: the CPU probe against the kernel's figures, NVML with a fake."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from fakes.nvml import FakeGpu, FakeNvml, NVMLError

from zerowatch.runtime.devices.cpu import CpuDevice, usable_cores
from zerowatch.runtime.devices.device_probes import device_probes, hardware_ids

Install = Callable[..., FakeNvml]


@pytest.fixture
def install_nvml(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that puts a fake NVML in place of pynvml."""

    def install(*gpus: FakeGpu, visible: str | None = None, loads: bool = True) -> FakeNvml:
        nvml = FakeNvml(*gpus, loads=loads)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return nvml

    return install


def cool_and_hot() -> tuple[FakeGpu, FakeGpu]:
    return (
        FakeGpu(uuid="GPU-aaaa-1", temperature_celsius=30),
        FakeGpu(uuid="GPU-bbbb-2", temperature_celsius=80),
    )


def celsius(cuda_device: int) -> float:
    (probe,) = device_probes(device_index=cuda_device)
    return probe.read()["temperature_celsius"]


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def cpu_seconds_by_the_kernel() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def clocks() -> tuple[float, float]:
    """Return the time, and the CPU time of this process."""
    return time.monotonic(), cpu_seconds_by_the_kernel()


def test_one_busy_thread_reads_as_its_share_of_the_usable_cores() -> None:
    before = clocks()
    probe = CpuDevice()
    began = clocks()

    while cpu_seconds_by_the_kernel() - began[1] < 0.3:
        pass
    ended = clocks()
    utilization = probe.read()["utilization_ratio"]

    # The probe read both clocks at some moment between ours, which are apart on a busy machine.
    after, cores = clocks(), len(os.sched_getaffinity(0))
    least = (ended[1] - began[1]) / (after[0] - before[0]) / cores
    most = (after[1] - before[1]) / (ended[0] - began[0]) / cores
    assert 0.9 * least < utilization < 1.1 * most


def test_a_sleeping_process_reads_as_idle() -> None:
    probe = CpuDevice()

    time.sleep(0.2)

    assert probe.read()["utilization_ratio"] < 0.1


def test_a_process_bound_to_one_core_may_use_one_core() -> None:
    program = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from zerowatch.runtime.devices.cpu import usable_cores; print(usable_cores())"
    )

    assert float(subprocess.check_output([sys.executable, "-c", program])) == 1.0


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/pod/r0\n", {"pod/r0/cpu.max": "max 100000", "pod/cpu.max": "50000 100000"}, 0.5),
        ("4:cpu,cpuacct:/pod\n", {"cpu/pod/cpu.cfs_quota_us": "50000"}, 0.5),
        ("4:cpu:/pod\n", {"cpu/pod/cpu.cfs_quota_us": "-1"}, len(os.sched_getaffinity(0))),
        ("0::/not-mounted-here\n", {"cpu.max": "50000 100000"}, 0.5),
    ],
    ids=["version 2, on the parent", "version 1", "version 1, unlimited", "inside a container"],
)
def test_a_cgroup_quota_limits_the_cores(
    groups: str, files: dict[str, str], cores: float, tmp_path: Path
) -> None:
    write(tmp_path / "proc/self/cgroup", groups)
    write(tmp_path / "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us", "100000\n")
    for name, content in files.items():
        write(tmp_path / "sys/fs/cgroup" / name, content + "\n")

    assert usable_cores(tmp_path) == cores


def test_a_clock_that_psutil_cannot_read_is_absent_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise NotImplementedError("no frequency here")

    monkeypatch.setattr(psutil, "cpu_freq", fail)

    with caplog.at_level(logging.INFO):
        probe = CpuDevice()
        readings = [probe.read() for _ in range(3)]

    assert all("clock_hertz" not in reading for reading in readings)
    assert [r.message for r in caplog.records if "clock_hertz" in r.message] == [
        "cpu: clock_hertz not read: no frequency here"
    ]


def test_a_clock_that_takes_long_to_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow() -> SimpleNamespace:
        time.sleep(0.01)
        return SimpleNamespace(current=2400.0)

    monkeypatch.setattr(psutil, "cpu_freq", slow)

    assert "clock_hertz" not in CpuDevice().read()


def test_a_clock_is_read_in_hertz(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_freq", lambda: SimpleNamespace(current=2400.0))

    assert CpuDevice().read()["clock_hertz"] == 2.4e9


def test_nvml_readings_are_in_base_units(install_nvml: Install) -> None:
    gpu = FakeGpu(
        uuid="GPU-a", sm_active_percent=75.0, link_counters={138: 10, 139: 20, 197: 30, 198: 40}
    )
    install_nvml(gpu)
    (probe,) = device_probes(device_index=0)

    gpu.energy_millijoules = 5_090_000
    gpu.link_counters = {138: 11, 139: 22, 197: 33, 198: 44}
    readings = probe.read()

    assert probe.device == "cuda:0"
    assert readings == {
        "utilization_ratio": 0.4,
        "power_watts": 250.0,
        "temperature_celsius": 61.0,
        "clock_hertz": 1980e6,
        "sm_active_ratio": 0.75,
        "energy_joules": 90.0,
        "nvlink_sent_bytes": 1024.0,
        "nvlink_received_bytes": 2048.0,
        "pcie_sent_bytes": 3.0,
        "pcie_received_bytes": 4.0,
    }


def test_readings_that_a_gpu_does_not_support_are_absent(install_nvml: Install) -> None:
    install_nvml(FakeGpu(uuid="GPU-a", energy_millijoules=None, power_milliwatts=None))
    (probe,) = device_probes(device_index=0)

    assert set(probe.read()) == {"utilization_ratio", "temperature_celsius", "clock_hertz"}


def test_a_counter_that_wraps_around_does_not_go_back(install_nvml: Install) -> None:
    gpu = FakeGpu(uuid="GPU-a", link_counters={197: 4_294_967_000})
    install_nvml(gpu)
    (probe,) = device_probes(device_index=0)

    totals = []
    for counter in (4_294_967_200, 100, 300):
        gpu.link_counters[197] = counter
        totals.append(probe.read()["pcie_sent_bytes"])

    assert totals == [200, 300, 500]


def test_a_link_counter_of_32_bits_is_not_read_because_it_wraps_between_two_readings(
    install_nvml: Install,
) -> None:
    counters = {138: 10, 139: 20, 197: 30, 198: 40}
    install_nvml(FakeGpu(uuid="GPU-a", link_counters=counters, narrow_fields=frozenset({197, 198})))
    (probe,) = device_probes(device_index=0)

    links = {name for name in probe.read() if name.endswith("_bytes")}
    assert links == {"nvlink_sent_bytes", "nvlink_received_bytes"}


def test_a_reading_that_fails_later_is_absent_and_logged_once(
    install_nvml: Install, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = FakeGpu(uuid="GPU-a")
    install_nvml(gpu)
    (probe,) = device_probes(device_index=0)
    gpu.power_milliwatts = None

    readings = [probe.read() for _ in range(3)]

    assert all("power_watts" not in reading for reading in readings)
    assert all("clock_hertz" in reading for reading in readings)
    assert [record.message for record in caplog.records] == [
        f"cuda:0: NVML fails to read power_watts: {NVMLError(3)}"
    ]


def test_close_frees_all_of_nvml_and_may_be_called_twice(install_nvml: Install) -> None:
    nvml = install_nvml(FakeGpu(uuid="GPU-a", sm_active_percent=10.0))
    (probe,) = device_probes(device_index=0)
    held = (nvml.opened, len(nvml.live_samples))

    probe.close()
    probe.close()

    assert held == (1, 2)
    assert (nvml.opened, nvml.live_samples) == (0, [])
    assert probe.read() == {}


@pytest.mark.parametrize(("visible", "expected"), [(None, [30, 80]), ("1,0", [80, 30])])
def test_cuda_visible_devices_selects_and_renumbers_gpus(
    visible: str | None, expected: list[float], install_nvml: Install
) -> None:
    install_nvml(*cool_and_hot(), visible=visible)

    assert [celsius(0), celsius(1)] == expected


@pytest.mark.parametrize("visible", ["GPU-bbbb-2", "GPU-b", " GPU-bbbb-2 ,GPU-aaaa-1"])
def test_cuda_visible_devices_may_hold_abbreviated_uuids(
    visible: str, install_nvml: Install
) -> None:
    install_nvml(*cool_and_hot(), visible=visible)

    assert celsius(0) == 80


def test_a_mig_slice_is_found_by_its_uuid(install_nvml: Install) -> None:
    mig = FakeGpu(uuid="MIG-cccc-3", temperature_celsius=50)
    install_nvml(*cool_and_hot(), mig, visible="MIG-cccc-3")

    assert celsius(0) == 50


@pytest.mark.parametrize(("visible", "found"), [(None, []), ("0", []), ("MIG-cccc-3", [50])])
def test_a_mig_slice_has_its_own_readings_or_none_but_not_those_of_its_gpu(
    visible: str | None,
    found: list[float],
    install_nvml: Install,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_nvml(
        FakeGpu(uuid="GPU-aaaa-1", temperature_celsius=30),
        FakeGpu(uuid="MIG-cccc-3", temperature_celsius=50),
        visible=visible,
    )
    properties = SimpleNamespace(uuid="aaaa-1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 MIG 1g.10gb")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    probes = device_probes(device_index=0)

    assert [probe.read()["temperature_celsius"] for probe in probes] == found


@pytest.mark.parametrize(
    ("name", "hardware_id"),
    [("NVIDIA H100", "GPU-aaaa-1"), ("NVIDIA H100 MIG 1g.10gb", "MIG-aaaa-1")],
)
def test_the_hardware_id_is_the_uuid_as_nvidia_smi_prints_it(
    name: str, hardware_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(uuid="aaaa-1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    assert hardware_ids(device_index=0) == {"cuda:0": hardware_id}


def test_the_hardware_id_of_a_later_gpu_of_the_host_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uuids = ("aaaa-1", "bbbb-2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index])
    )

    assert hardware_ids(device_index=1) == {"cuda:1": "GPU-bbbb-2"}


@pytest.mark.parametrize(("device_index", "available"), [(None, True), (0, False)])
def test_without_a_gpu_there_is_no_hardware_id(
    device_index: int | None, available: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)

    assert hardware_ids(device_index=device_index) == {}


@pytest.mark.parametrize(
    "visible",
    ["", "-1", "NoDevFiles", "1,1", "7", "GPU-zzzz", "GPU-", "MIG-zzzz", "-1,0"],
)
def test_a_gpu_that_is_not_visible_has_no_probe_and_one_line(
    visible: str, install_nvml: Install, caplog: pytest.LogCaptureFixture
) -> None:
    nvml = install_nvml(*cool_and_hot(), visible=visible)

    with caplog.at_level(logging.INFO):
        probes = device_probes(device_index=0)

    assert probes == []
    assert len(caplog.records) == 1
    assert nvml.opened == 0


def test_the_uuid_by_cuda_takes_precedence(
    install_nvml: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_nvml(*cool_and_hot(), visible="0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(uuid="bbbb-2", name="NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    assert celsius(0) == 80


def test_without_nvml_a_gpu_has_no_probe_and_one_line(
    install_nvml: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install_nvml(loads=False)

    with caplog.at_level(logging.INFO):
        probes = device_probes(device_index=0)

    assert probes == []
    assert [record.levelname for record in caplog.records] == ["INFO"]
