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
        self.num_reads += 1
        busy = {} if self.busy_ratio is None else {"utilization_ratio": self.busy_ratio}
        return busy | self.values

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.states: dict[tuple[str, ...], float] | None = {}
        self.num_reads = self.num_closed = 0
        self.error: Exception | None = None

    def health(self) -> dict[tuple[str, ...], float] | None:
        return self.states

    def close(self) -> None:
        self.num_closed += 1
        if self.error is not None:
            raise self.error


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


def test_each_reading_has_its_metric_and_labels(gpu):
    gpu.probe.values = {
        "sm_active_ratio": 0.25,
        "power_watts": 3.0,
        "temperature_celsius": 5.0,
        "clock_hertz": 7.0,
        "energy_joules": 11.0,
        "nvlink_sent_bytes": 13.0,
        "nvlink_received_bytes": 17.0,
        "pcie_sent_bytes": 19.0,
        "pcie_received_bytes": 23.0,
    }
    gpu.goes_on(1.0, 0.5)

    values = gpu.recorder.snapshot().values
    gpu_label = ("cuda:0",)
    assert {spec: values[spec] for spec in values if spec != devices.DEVICE_SECONDS} == {
        devices.DEVICE_UTILIZATION: {gpu_label: 0.5},
        devices.DEVICE_SM_ACTIVE: {gpu_label: 0.25},
        devices.DEVICE_POWER: {gpu_label: 3.0},
        devices.DEVICE_TEMPERATURE: {gpu_label: 5.0},
        devices.DEVICE_CLOCK: {gpu_label: 7.0},
        devices.DEVICE_ENERGY: {gpu_label: 11.0},
        devices.DEVICE_LINK_BYTES: {
            ("cuda:0", "nvlink", "sent"): 13.0,
            ("cuda:0", "nvlink", "received"): 17.0,
            ("cuda:0", "pcie", "sent"): 19.0,
            ("cuda:0", "pcie", "received"): 23.0,
        },
    }
    assert gpu.sampler.device_readings == {"cuda:0": {"utilization_ratio": 0.5} | gpu.probe.values}


@pytest.mark.parametrize(
    ("state", "spec"),
    [
        (("lost",), devices.DEVICE_LOST),
        (("temperature_limit_celsius",), devices.DEVICE_TEMPERATURE_LIMIT),
        (("ecc_errors", "corrected"), devices.DEVICE_ECC_ERRORS),
        (("remapped_rows", "uncorrected"), devices.DEVICE_REMAPPED_ROWS),
        (("row_remap", "pending"), devices.DEVICE_ROW_REMAP),
        (("link_errors", "pcie", "replay"), devices.DEVICE_LINK_ERRORS),
        (("xid_errors", "79"), devices.DEVICE_XID_ERRORS),
    ],
)
def test_each_state_of_health_has_its_metric_and_labels(gpu, state, spec):
    gpu.probe.states = {state: 3.0}

    gpu.goes_on(1.0, 0.5)

    assert gpu.recorder.snapshot().values[spec] == {("cuda:0", *state[1:]): 3.0}


def test_devices_are_read_once_an_interval(gpu):
    for seconds in (0.5, 0.4, 0.1, 0.9, 0.2):
        gpu.goes_on(seconds, 0.5)

    assert gpu.probe.num_reads == 1 + 2


def test_a_series_that_is_no_longer_read_is_removed_and_comes_back(gpu):
    gpu.probe.values = {"power_watts": 3.0}
    gpu.goes_on(1.0, 0.5)
    gpu.probe.values = {}
    gpu.goes_on(1.0, 0.5)
    without = gpu.recorder.snapshot()
    gpu.probe.values = {"power_watts": 4.0}
    gpu.goes_on(1.0, 0.5)

    assert without.value(devices.DEVICE_POWER, "cuda:0") is None
    assert without.value(devices.DEVICE_UTILIZATION, "cuda:0") == 0.5
    assert gpu.recorder.snapshot().value(devices.DEVICE_POWER, "cuda:0") == 4.0


def test_a_device_without_any_reading_is_absent(gpu):
    gpu.probe.states = None

    gpu.goes_on(1.0, None)

    assert gpu.sampler.device_readings == {}


def test_all_probes_are_closed_even_if_one_fails():
    probes = [Probe(), Probe()]
    probes[0].error = OSError("gone")
    fail_open = FailOpen()

    DeviceSampler(Recorder(), fail_open, probes, 1.0, FakeClock()).close()

    assert [probe.num_closed for probe in probes] == [1, 1]
    assert fail_open.failures == {"devices": 1}
