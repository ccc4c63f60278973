"""The CPU probe with scripted clocks, sensors, threads and quotas."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from zerowatch.runtime.devices import cpu
from zerowatch.runtime.devices.cpu import CpuDevice, usable_cores


class Clocks:
    """Stands in for the module `time`; reading a sensor takes `reading_seconds`."""

    def __init__(self) -> None:
        self.wall = 100.0
        self.used = 7.0
        self.reading_seconds = 0.0
        self._passed = 0.0

    def monotonic(self) -> float:
        return self.wall

    def process_time(self) -> float:
        return self.used

    def perf_counter(self) -> float:
        return self._passed

    def sensors(self) -> Mapping[str, list[SimpleNamespace]]:
        self._passed += self.reading_seconds
        return {"k10temp": [SimpleNamespace(current=61.0)]}


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(cpu, "time", clocks)
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: {}, raising=False)
    monkeypatch.setattr(psutil, "cpu_freq", lambda: None)
    return clocks


def with_threads(
    monkeypatch: pytest.MonkeyPatch, cores_of: Mapping[int, set[int]], ended: int | None = None
) -> None:
    def affinity(thread: int) -> set[int]:
        if thread == ended:
            raise ProcessLookupError
        return cores_of[thread]

    monkeypatch.setattr(os, "sched_getaffinity", affinity, raising=False)
    threads = [str(thread) for thread in (*cores_of, *([] if ended is None else [ended]))]
    monkeypatch.setattr(os, "listdir", lambda path: sorted(threads, reverse=True))


def test_utilization_is_the_cpu_time_since_the_last_reading_by_time_and_cores(
    clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "usable_cores", lambda: 4.0)
    probe = CpuDevice()

    readings = []
    for wall, used in ((10.0, 6.0), (5.0, 17.0), (2.0, 9.0), (0.0, 1.0)):
        clocks.wall += wall
        clocks.used += used
        readings.append(dict(probe.read()))

    # 6 s of 40, 17 of 20, more than the cores can do, and no time to divide by.
    assert readings == [
        {"utilization_ratio": 0.15},
        {"utilization_ratio": 0.85},
        {"utilization_ratio": 1.0},
        {},
    ]
    assert (probe.device, probe.health()) == ("cpu", {})


def test_the_temperature_is_the_highest_of_the_cpu_s_own_sensors(
    clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {"nvme": 90.0, "coretemp": 41.0, "cpu_thermal": 52.0, "zenpower": 47.0}
    sensors = {name: [SimpleNamespace(current=celsius)] for name, celsius in entries.items()}
    sensors["k10temp"] = [SimpleNamespace(current=30.0), SimpleNamespace(current=63.0)]
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: sensors)

    assert CpuDevice().read() == {"temperature_celsius": 63.0}


@pytest.mark.parametrize("name", ["coretemp", "k10temp", "zenpower", "cpu_thermal"])
def test_each_driver_of_a_cpu_s_sensor_is_known(
    name: str, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    sensors = {name: [SimpleNamespace(current=55.0)]}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: sensors)

    assert CpuDevice().read()["temperature_celsius"] == 55.0


@pytest.mark.parametrize("clock", [None, SimpleNamespace(current=0.0)])
def test_a_clock_that_the_platform_lacks_is_absent(
    clock: SimpleNamespace | None,
    clocks: Clocks,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(psutil, "cpu_freq", lambda: clock)
    caplog.set_level(logging.INFO)

    assert CpuDevice().read() == {}
    assert "cpu: clock_hertz not read: not available on this machine" in caplog.messages


@pytest.mark.parametrize(("seconds", "is_read"), [(0.001, True), (0.0011, False)])
def test_a_sensor_that_takes_more_than_a_millisecond_is_left_out(
    seconds: float,
    is_read: bool,
    clocks: Clocks,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clocks.reading_seconds = seconds
    clocks._passed = -seconds  # so that the second call is timed from 0
    monkeypatch.setattr(psutil, "sensors_temperatures", clocks.sensors)
    caplog.set_level(logging.INFO)

    assert ("temperature_celsius" in CpuDevice().read()) is is_read
    line = "cpu: temperature_celsius not read: reading it takes too long"
    assert (line in caplog.messages) is not is_read


def test_a_sensor_that_fails_later_is_left_out_with_one_line_and_the_clock_stays(
    clocks: Clocks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError("no such sensor")

    monkeypatch.setattr(psutil, "sensors_temperatures", clocks.sensors)
    monkeypatch.setattr(psutil, "cpu_freq", lambda: SimpleNamespace(current=2400.0))
    probe = CpuDevice()
    monkeypatch.setattr(psutil, "sensors_temperatures", fail)
    caplog.set_level(logging.INFO)

    assert [probe.read() for _ in range(3)] == [{"clock_hertz": 2.4e9}] * 3
    assert caplog.messages == ["cpu: temperature_celsius not read from now on: no such sensor"]


def test_a_sensor_that_has_no_value_for_a_moment_is_read_again(
    clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "sensors_temperatures", clocks.sensors)
    probe = CpuDevice()

    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: {})
    readings = [probe.read()]
    monkeypatch.setattr(psutil, "sensors_temperatures", clocks.sensors)
    for seconds in (4.9, 0.1):
        clocks.wall += seconds
        readings.append(probe.read())

    assert ["temperature_celsius" in reading for reading in readings] == [False, False, True]


def test_the_clock_is_read_every_five_seconds_and_kept_meanwhile(
    clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "cpu_freq", lambda: SimpleNamespace(current=clocks.wall))
    probe = CpuDevice()
    seen = []
    for _ in range(11):
        seen.append(probe.read()["clock_hertz"] / 1e6)
        clocks.wall += 1.0

    assert seen == [100.0] * 5 + [105.0] * 5 + [110.0]


def test_the_cores_are_those_of_all_threads_that_still_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cores_of = {0: {3}, 11: {3}, 12: {4, 5}, 14: {5, 9, 10}}
    with_threads(monkeypatch, cores_of, ended=13)

    assert usable_cores(tmp_path) == 5.0


@pytest.mark.parametrize(("count", "cores"), [(6, 6.0), (None, 1.0)])
def test_without_affinity_all_cores_of_the_machine_are_usable(
    count: int | None, cores: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: count)

    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("quota", "cores"), [("250000 100000", 2.5), ("30000 20000", 1.5), ("900000 100000", 3.0)]
)
def test_a_quota_counts_only_if_it_is_less_than_the_cores(
    quota: str, cores: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_threads(monkeypatch, {0: {0, 1, 2}})
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(f"{quota}\n")

    assert usable_cores(tmp_path) == cores
