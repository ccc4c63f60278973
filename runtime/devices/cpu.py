"""Reads the CPU: its use by this process, clock and temperature, and the number of usable cores."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from ..common.cgroups import cgroup_folders
from .gpu_health import HealthReadings

logger = logging.getLogger(__name__)
# Readings that take longer are left out. psutil reads the clock of each core and each sensor, which
# takes milliseconds on a large machine.
_AFFORDABLE_SECONDS = 0.001
# Time between two readings of clock and temperature. They cost most of a reading.
_OPTIONAL_SECONDS = 5.0
# Linux drivers and firmware that report a CPU's temperature, in psutil's naming.
_CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
# AttributeError: psutil has the function on some platforms only. ValueError: an odd /sys file.
_READING_ERRORS = (psutil.Error, OSError, NotImplementedError, AttributeError, ValueError)


def _clock_hertz() -> float | None:
    clock = psutil.cpu_freq()  # None, or 0 MHz, where the platform lacks it
    return clock.current * 1e6 if clock and clock.current else None


def _temperature_celsius() -> float | None:
    sensors = psutil.sensors_temperatures()
    celsius = [entry.current for name in _CPU_SENSORS for entry in sensors.get(name, ())]
    return max(celsius, default=None)


_OPTIONAL: Mapping[str, Callable[[], float | None]] = {
    "clock_hertz": _clock_hertz,
    "temperature_celsius": _temperature_celsius,
}


class CpuDevice:
    """Reads the use of this process's cores, and the machine's clock and temperature.

    Utilization is the CPU time of all threads of this process since the last reading, divided by
    the wall time and the number of cores. Data loader workers are not included.
    """

    device = "cpu"

    def __init__(self) -> None:
        self._cores = usable_cores()
        self._optional = {
            name: read for name, read in _OPTIONAL.items() if _is_affordable(name, read)
        }
        self._optional_readings: Mapping[str, float] = {}
        self._optional_due = 0.0
        self._wall_seconds = time.monotonic()
        self._cpu_seconds = time.process_time()

    def read(self) -> Mapping[str, float]:
        """Return utilization_ratio and, where available, clock_hertz and temperature_celsius.

        Clock and temperature are read every five seconds.
        """
        wall, cpu = time.monotonic(), time.process_time()
        elapsed, used = wall - self._wall_seconds, cpu - self._cpu_seconds
        self._wall_seconds, self._cpu_seconds = wall, cpu
        if wall >= self._optional_due:
            self._optional_due = wall + _OPTIONAL_SECONDS
            self._optional_readings = {
                name: value for name in list(self._optional) for value in self._ask(name)
            }
        readings = dict(self._optional_readings)
        if elapsed > 0:
            # Clock ticks can make the ratio slightly larger than 1.
            readings["utilization_ratio"] = min(1.0, used / elapsed / self._cores)
        return readings

    def health(self) -> HealthReadings:
        """Return nothing: only the health of GPUs is read."""
        return {}

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _ask(self, name: str) -> list[float]:
        try:
            value = self._optional[name]()
        except _READING_ERRORS as error:
            logger.info("cpu: %s not read from now on: %s", name, error)
            del self._optional[name]
            return []
        return [] if value is None else [value]


def _is_affordable(name: str, read: Callable[[], float | None]) -> bool:
    """Time a second call of a reading. Return whether it gives a value and is cheap."""
    try:
        read()
        started = time.perf_counter()
        known = read() is not None
    except _READING_ERRORS as error:
        logger.info("cpu: %s not read: %s", name, error)
        return False
    cheap = time.perf_counter() - started <= _AFFORDABLE_SECONDS
    if not (known and cheap):
        reason = "not available on this machine" if not known else "reading it takes too long"
        logger.info("cpu: %s not read: %s", name, reason)
    return known and cheap


def usable_cores(root: Path = Path("/")) -> float:
    """Return the number of cores this process may use, by affinity and by its cgroup's quota.

    Under a quota, the number can be a fraction.
    """
    quotas = map(_quota, cgroup_folders("cpu", root))
    return min([float(_affine_cores()), *(quota for quota in quotas if quota is not None)])


def _affine_cores() -> int:
    """Count the cores of all threads: OpenMP may have bound the main thread to one of them."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        try:
            cores |= os.sched_getaffinity(int(thread))
        except ProcessLookupError:  # the thread has ended
            continue
    return len(cores)


def _quota(folder: Path) -> float | None:
    """Return the number of cores in a cgroup's quota (version 2 or 1), or None without one."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            words = " ".join((folder / name).read_text() for name in names).split()
        except OSError:
            continue
        quota, period = words
        return None if quota in ("max", "-1") else int(quota) / int(period)
    return None
