"""Tests of the seconds in which a device was busy, by `device_sampler.py` with a fake probe."""

from __future__ import annotations

import pytest
from fakes.clock import FakeClock

from zerowatch.metrics.catalog import devices
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.monitor.device_sampler import DeviceSampler


class Probe:
    """A GPU that is as busy as the test says; None if it cannot be read."""

    device = "cuda:0"
    busy_ratio: float | None = 0.0

    def read(self) -> dict[str, float]:
        return {} if self.busy_ratio is None else {"utilization_ratio": self.busy_ratio}

    def health(self) -> dict[tuple[str, ...], float]:
        return {}

    def close(self) -> None:
        pass


class Gpu:
    def __init__(self) -> None:
        self.clock, self.probe, self.recorder = FakeClock(), Probe(), Recorder()
        self.sampler = DeviceSampler(self.recorder, FailOpen(), [self.probe], 1.0, self.clock)
        self.sampler.read_devices()

    def goes_on(self, seconds: float, busy_ratio: float | None) -> None:
        self.clock.seconds += seconds
        self.probe.busy_ratio = busy_ratio
        self.sampler.read_devices()

    def seconds(self) -> list[float | None]:
        read = self.recorder.snapshot().value
        return [read(devices.DEVICE_SECONDS, "cuda:0", state) for state in ("busy", "idle")]


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


def test_the_busy_seconds_are_the_utilization_added_up_over_time(gpu):
    gpu.goes_on(1.0, 0.9)
    gpu.goes_on(1.5, 0.4)
    gpu.goes_on(1.0, 0.0)

    assert gpu.seconds() == pytest.approx([0.9 + 0.6, 3.5 - 1.5])


def test_time_in_which_a_device_cannot_be_read_counts_as_neither_busy_nor_idle(gpu):
    gpu.goes_on(1.0, 1.0)
    for _ in range(10):
        gpu.goes_on(1.0, None)
    gpu.goes_on(1.0, 1.0)
    gpu.goes_on(1.0, 1.0)

    assert gpu.seconds() == pytest.approx([2.0, 0.0])


def test_a_device_never_counts_as_more_than_busy(gpu):
    gpu.goes_on(1.0, 1.02)

    assert gpu.seconds() == pytest.approx([1.0, 0.0])
