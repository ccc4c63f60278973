"""The health of a GPU by the real pynvml, which loads a scripted library in place of NVIDIA's.

Covers `gpu_health.py`, `nvml_probe.py` and `device_sampler.py`.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes.clock import FakeClock
from fakes.nvml_library import HEALTHY, NvmlLibrary

from zerowatch.metrics.catalog import devices as catalog
from zerowatch.metrics.catalog.spec import MetricSpec
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.xid_errors import XIDS, describe
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.devices import gpu_health
from zerowatch.runtime.devices.cpu import CpuDevice
from zerowatch.runtime.devices.nvml_inventory import nvml_inventory
from zerowatch.runtime.devices.nvml_probe import NvmlDevice, nvml_device, nvml_device_of
from zerowatch.runtime.monitor.device_sampler import DeviceSampler

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
UUID = str(HEALTHY["0.uuid"])
HEALTH = (
    catalog.DEVICE_TEMPERATURE_LIMIT,
    catalog.DEVICE_THROTTLED_SECONDS,
    catalog.DEVICE_ECC_ERRORS,
    catalog.DEVICE_REMAPPED_ROWS,
    catalog.DEVICE_ROW_REMAP,
    catalog.DEVICE_LINK_ERRORS,
)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> NvmlLibrary:
    return NvmlLibrary(monkeypatch, tmp_path / "nvml.txt")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


class Sampled:
    """A probe whose readings are published into a recorder."""

    def __init__(self, probe: NvmlDevice) -> None:
        self.recorder = Recorder()
        self.fail_open = FailOpen()
        self.sampler = DeviceSampler(self.recorder, self.fail_open, [probe], 0.0)

    def read(self) -> None:
        self.sampler.read_devices()

    def value(self, spec: MetricSpec, *labels: str) -> float | None:
        return self.recorder.snapshot().value(spec, "cuda:0", *labels)

    def series(self, spec: MetricSpec) -> Mapping[tuple[str, ...], float]:
        return self.recorder.snapshot().values.get(spec, {})


@pytest.fixture
def gpu(library: NvmlLibrary, clock: FakeClock) -> Sampled:
    return sampled(clock)


def sampled(clock: FakeClock) -> Sampled:
    probe = nvml_device(0, now=clock)
    assert probe is not None
    return Sampled(probe)


def test_a_card_is_identified_by_its_uuid_address_name_and_driver(gpu: Sampled) -> None:
    gpu.read()

    card = ("cuda:0", UUID, "00000000:1B:00.0", "NVIDIA H100 80GB HBM3", "580.95.05")
    assert gpu.series(catalog.DEVICE_INFO) == {card: 1.0}
    assert gpu.value(catalog.DEVICE_UTILIZATION) == 0.97


def make_old(pynvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a module pynvml behave as the distribution pynvml 11.4.1, which has the same name.

    It returns bytes, takes a UUID as bytes, and lacks newer functions and constants.
    """
    for name in ("nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlSystemGetDriverVersion"):
        now = getattr(pynvml, name)
        monkeypatch.setattr(pynvml, name, lambda *gpu, now=now: now(*gpu).encode())
    find = pynvml.nvmlDeviceGetHandleByUUID

    def find_by_bytes(uuid: bytes) -> Any:
        if not isinstance(uuid, bytes):
            raise TypeError("bytes or integer address expected instead of str instance")
        return find(uuid.decode())

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", find_by_bytes)
    newer = [name for name in vars(pynvml) if "gpm" in name.lower() or "PCIE_COUNT" in name]
    for name in (*newer, "nvmlDeviceGetMarginTemperature", "nvmlDeviceGetMemoryBusWidth"):
        monkeypatch.delattr(pynvml, name)


@pytest.mark.parametrize("visible", [None, UUID, UUID[:12]])
def test_an_old_pynvml_gives_the_readings_that_it_has(
    library: NvmlLibrary, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, visible: str | None
) -> None:
    make_old(library.pynvml, monkeypatch)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpu = sampled(clock)

    gpu.read()

    card = ("cuda:0", UUID, "00000000:1B:00.0", "NVIDIA H100 80GB HBM3", "580.95.05")
    assert gpu.series(catalog.DEVICE_INFO) == {card: 1.0}
    assert gpu.value(catalog.DEVICE_UTILIZATION) == 0.97
    assert gpu.value(catalog.DEVICE_TEMPERATURE_LIMIT) == 88
    assert gpu.fail_open.failures == {}
    other = nvml_device_of("cuda:0", UUID)  # of the monitoring process
    assert other is not None
    assert other.uuid == UUID


def test_an_old_pynvml_lists_the_gpus_of_the_host(
    library: NvmlLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_old(library.pynvml, monkeypatch)

    found = nvml_inventory()

    assert found is not None
    assert [(gpu.uuid, gpu.memory_bytes_per_second) for gpu in found.devices] == [(UUID, None)]


def test_the_state_of_the_card_is_published_as_it_is(gpu: Sampled) -> None:
    gpu.read()

    assert gpu.value(catalog.DEVICE_TEMPERATURE_LIMIT) == 88
    assert gpu.value(catalog.DEVICE_REMAPPED_ROWS, "corrected") == 1
    assert gpu.value(catalog.DEVICE_REMAPPED_ROWS, "uncorrected") == 2
    assert gpu.value(catalog.DEVICE_ROW_REMAP, "pending") == 0
    assert gpu.value(catalog.DEVICE_ROW_REMAP, "failed") == 0
    assert gpu.value(catalog.DEVICE_LOST) == 0
    assert gpu.series(catalog.DEVICE_XID_ERRORS) == {}
    assert gpu.fail_open.failures == {}


# Each counter of errors: its key in the library's script, its metric and labels.
ERROR_COUNTERS = [
    ("0.ecc0.0", catalog.DEVICE_ECC_ERRORS, ("corrected",)),
    ("0.ecc1.0", catalog.DEVICE_ECC_ERRORS, ("uncorrected",)),
    ("0.pcie_replays", catalog.DEVICE_LINK_ERRORS, ("pcie", "replay")),
    ("0.link3.0", catalog.DEVICE_LINK_ERRORS, ("nvlink", "replay")),
    ("0.link3.1", catalog.DEVICE_LINK_ERRORS, ("nvlink", "recovery")),
    ("0.link3.2", catalog.DEVICE_LINK_ERRORS, ("nvlink", "crc")),
]


@pytest.mark.parametrize(
    ("key", "spec", "labels"), ERROR_COUNTERS, ids=[key for key, *_ in ERROR_COUNTERS]
)
def test_errors_before_monitoring_are_not_counted(
    library: NvmlLibrary, clock: FakeClock, key: str, spec: MetricSpec, labels: tuple[str, ...]
) -> None:
    """The driver's counters begin when it is loaded. A reload or a reset sets them to 0."""
    library.script({key: 1000})
    gpu = sampled(clock)
    seen = []

    for count in (1000, 1007, 2, 3):
        library.script({key: count})
        clock.seconds += gpu_health.COUNTERS_SECONDS
        gpu.read()
        seen.append(gpu.value(spec, *labels))

    assert seen == [0, 7, 7 + 2, 7 + 3]


def test_errors_of_nvlinks_are_summed_over_the_links(
    library: NvmlLibrary, clock: FakeClock
) -> None:
    library.script({"0.link0.0": 10})
    gpu = sampled(clock)
    library.script({"0.link0.0": 11, "0.link17.0": 2, "0.link3.1": 5, "0.link4.2": 70})

    gpu.read()

    assert gpu.value(catalog.DEVICE_LINK_ERRORS, "nvlink", "replay") == 3
    assert gpu.value(catalog.DEVICE_LINK_ERRORS, "nvlink", "recovery") == 5
    assert gpu.value(catalog.DEVICE_LINK_ERRORS, "nvlink", "crc") == 70


def test_a_reset_of_one_link_s_counters_does_not_count_the_other_links_twice(
    library: NvmlLibrary, clock: FakeClock, gpu: Sampled
) -> None:
    library.script({"0.link0.0": 50, "0.link1.0": 900})
    gpu.read()
    library.script({"0.link1.0": 0})
    clock.seconds += gpu_health.COUNTERS_SECONDS

    gpu.read()

    assert gpu.value(catalog.DEVICE_LINK_ERRORS, "nvlink", "replay") == 950


def test_a_link_that_goes_down_keeps_its_errors_and_hides_no_other_link(
    library: NvmlLibrary, clock: FakeClock, gpu: Sampled
) -> None:
    library.script({"0.link3.0": 5, "0.link4.0": 2})
    gpu.read()
    seen = []

    for figures in (
        {"0.link3.0": None, "0.link4.0": 9},
        {"0.link3.0": 1},  # up again, and counts from 0
        {f"0.link{link}.0": None for link in range(18)},
    ):
        library.script(figures)
        clock.seconds += gpu_health.COUNTERS_SECONDS
        gpu.read()
        seen.append(gpu.value(catalog.DEVICE_LINK_ERRORS, "nvlink", "replay"))

    assert seen == [5 + 9, 5 + 9 + 1, None]


def test_recoveries_of_blackwell_s_links_come_from_its_own_field(
    library: NvmlLibrary, clock: FakeClock
) -> None:
    none = {f"0.link{link}.{kind}": None for link in range(18) for kind in range(3)}
    library.script({**none, **{f"0.field215.{link}": 9 for link in range(3)}})
    gpu = sampled(clock)
    library.script({f"0.field215.{link}": 9 + link for link in range(3)})

    gpu.read()

    assert gpu.value(catalog.DEVICE_LINK_ERRORS, "nvlink", "recovery") == 0 + 1 + 2
    assert gpu.value(catalog.DEVICE_LINK_ERRORS, "nvlink", "replay") is None


def test_the_slowdown_of_newer_cards_is_derived_from_their_margins(
    library: NvmlLibrary, clock: FakeClock
) -> None:
    """An H100 at 61 degrees with a margin of 25 slows down at a margin of -2."""
    library.script({"0.threshold1": None, "0.field194.0": -2, "0.margin": 25})
    gpu = sampled(clock)

    gpu.read()

    assert gpu.value(catalog.DEVICE_TEMPERATURE_LIMIT) == 61 + 25 + 2


def test_the_reasons_of_the_moment_count_for_the_time_since_the_last_reading(
    library: NvmlLibrary, clock: FakeClock, gpu: Sampled
) -> None:
    library.script({"0.reasons": 0x40 | 0x08})
    clock.seconds += 2.0
    gpu.read()
    library.script({"0.reasons": 0x04 | 0x01 | 0x02})  # idle and application clocks do not count
    clock.seconds += 3.0
    gpu.read()
    library.script({"0.reasons": 0})
    clock.seconds += 4.0
    gpu.read()

    seconds = {
        reason[1]: value for reason, value in gpu.series(catalog.DEVICE_THROTTLED_SECONDS).items()
    }
    assert seconds == {
        "hw_thermal": 2.0,
        "hw_slowdown": 2.0,
        "power_cap": 3.0,
        "sw_thermal": 0.0,
        "power_brake": 0.0,
    }


def test_time_in_which_a_device_was_not_observed_is_not_counted(
    library: NvmlLibrary, clock: FakeClock, gpu: Sampled
) -> None:
    library.script({"0.reasons": 0x80})
    clock.seconds += 3600.0

    gpu.read()

    brake = gpu.value(catalog.DEVICE_THROTTLED_SECONDS, "power_brake")
    assert brake == gpu_health.LONGEST_GAP_SECONDS


def test_a_driver_before_535_gives_the_reasons_by_their_older_name(
    library: NvmlLibrary, clock: FakeClock
) -> None:
    gone = {f"0.nvmlDeviceGet{kind}ClocksEventReasons": 13 for kind in ("Current", "Supported")}
    library.script({**gone, "0.throttle_reasons": 0x20})
    gpu = sampled(clock)
    clock.seconds += 1.0

    gpu.read()

    assert gpu.value(catalog.DEVICE_THROTTLED_SECONDS, "sw_thermal") == 1.0


def test_reasons_that_a_card_does_not_support_are_absent(
    library: NvmlLibrary, clock: FakeClock
) -> None:
    library.script({"0.supported_reasons": 0x04})
    gpu = sampled(clock)

    gpu.read()

    assert list(gpu.series(catalog.DEVICE_THROTTLED_SECONDS)) == [("cuda:0", "power_cap")]


def test_figures_that_a_card_does_not_support_are_absent_and_not_0(
    library: NvmlLibrary, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    identity = ("driver", "0.uuid", "0.utilization")
    library.script({key: None for key in HEALTHY if key not in identity})
    with caplog.at_level(logging.INFO):
        gpu = sampled(clock)

    gpu.read()

    assert [spec.name for spec in HEALTH if gpu.series(spec)] == []
    assert gpu.series(catalog.DEVICE_INFO) == {("cuda:0", UUID, "", "", "580.95.05"): 1.0}
    assert gpu.value(catalog.DEVICE_LOST) == 0
    absent = " ".join(record.getMessage() for record in caplog.records)
    assert "does not offer" in absent
    assert "XID events" in absent
    assert "NVLink errors (crc)" in absent


@pytest.mark.parametrize("error", [15, 28, 16], ids=["lost", "not found", "needs a reset"])
def test_of_a_lost_gpu_only_its_loss_its_identity_and_its_xids_remain(
    error: int, library: NvmlLibrary, gpu: Sampled, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.read()
    library.script({"0.lost": error, "0.xids": "79"})

    for _ in range(3):
        gpu.read()

    left = {spec for spec in catalog.METRICS if gpu.series(spec)}
    assert left == {catalog.DEVICE_LOST, catalog.DEVICE_INFO, catalog.DEVICE_XID_ERRORS}
    assert gpu.value(catalog.DEVICE_LOST) == 1
    assert gpu.value(catalog.DEVICE_XID_ERRORS, "79") == 1
    assert gpu.sampler.device_readings == {}
    assert gpu.fail_open.failures == {}
    assert sum("no longer reaches" in record.message for record in caplog.records) == 1


def test_a_gpu_that_answers_again_is_no_longer_lost(
    library: NvmlLibrary, gpu: Sampled, clock: FakeClock
) -> None:
    library.script({"0.lost": 15})
    gpu.read()
    library.script({"0.lost": None, "0.ecc0.0": 5})
    clock.seconds += 60.0

    gpu.read()

    assert gpu.value(catalog.DEVICE_LOST) == 0
    assert gpu.value(catalog.DEVICE_ECC_ERRORS, "corrected") == 5 - 3


def test_an_error_that_is_no_loss_removes_one_series_only(
    library: NvmlLibrary, gpu: Sampled, clock: FakeClock
) -> None:
    gpu.read()
    library.script({"0.nvmlDeviceGetPcieReplayCounter": 999})
    clock.seconds += gpu_health.COUNTERS_SECONDS

    gpu.read()

    assert gpu.value(catalog.DEVICE_LINK_ERRORS, "pcie", "replay") is None
    assert gpu.value(catalog.DEVICE_LINK_ERRORS, "nvlink", "crc") == 0
    assert gpu.value(catalog.DEVICE_LOST) == 0


def test_counters_of_errors_are_read_every_15_seconds(
    library: NvmlLibrary, gpu: Sampled, clock: FakeClock
) -> None:
    gpu.read()
    library.script({"0.ecc1.0": 1})

    gpu.read()
    early = gpu.value(catalog.DEVICE_ECC_ERRORS, "uncorrected")
    clock.seconds += 15.0
    gpu.read()

    assert early == 0
    assert gpu.value(catalog.DEVICE_ECC_ERRORS, "uncorrected") == 1


def test_the_gpu_is_read_once_more_as_the_run_ends(library: NvmlLibrary, clock: FakeClock) -> None:
    recorder = Recorder()
    device = nvml_device(0, clock)
    assert device is not None
    sampler = DeviceSampler(recorder, FailOpen(), [device], 60.0, clock)
    sampler.read_devices()
    library.script({"0.xids": "79"})

    sampler.close()

    assert recorder.snapshot().value(catalog.DEVICE_XID_ERRORS, "cuda:0", "79") == 1


def test_an_xid_makes_the_counters_of_errors_be_read_at_once(
    library: NvmlLibrary, gpu: Sampled
) -> None:
    gpu.read()
    library.script({"0.ecc1.0": 1, "0.xids": "94"})

    gpu.read()

    assert gpu.value(catalog.DEVICE_XID_ERRORS, "94") == 1
    assert gpu.value(catalog.DEVICE_ECC_ERRORS, "uncorrected") == 1


@pytest.mark.parametrize(
    ("spec", "labels", "drains"),
    [
        (catalog.DEVICE_XID_ERRORS, ("cuda:0", "79"), True),
        (catalog.DEVICE_XID_ERRORS, ("cuda:0", "31"), False),
        (catalog.DEVICE_ECC_ERRORS, ("cuda:0", "uncorrected"), True),
        (catalog.DEVICE_ECC_ERRORS, ("cuda:0", "corrected"), False),
        (catalog.DEVICE_LOST, ("cuda:0",), True),
    ],
)
def test_a_gpu_asks_for_a_drain_by_its_loss_uncorrected_errors_and_some_xids(
    spec: MetricSpec, labels: tuple[str, ...], drains: bool
) -> None:
    recorder = Recorder()
    recorder.set(catalog.DEVICE_LOST, 0, "cuda:0")
    recorder.set(catalog.DEVICE_ECC_ERRORS, 0, "cuda:0", "uncorrected")
    healthy = gpu_health.asks_for_drain(recorder.snapshot())
    recorder.set(spec, 1, *labels)

    assert not healthy
    assert gpu_health.asks_for_drain(recorder.snapshot()) is drains


def test_each_xid_error_is_counted_by_its_number_and_logged(
    library: NvmlLibrary, gpu: Sampled, caplog: pytest.LogCaptureFixture
) -> None:
    library.script({"0.xids": "31 48"})
    gpu.read()
    library.script({"0.xids": "31 48 48"})
    gpu.read()
    gpu.read()

    assert gpu.series(catalog.DEVICE_XID_ERRORS) == {("cuda:0", "31"): 1.0, ("cuda:0", "48"): 2.0}
    logged = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert logged == [
        ("WARNING", f"cuda:0: XID 31: {describe(31)}"),
        ("ERROR", f"cuda:0: XID 48: {describe(48)}"),
        ("ERROR", f"cuda:0: XID 48: {describe(48)}"),
    ]


@pytest.mark.parametrize(
    "figures",
    [{"0.event_types": 0}, {"0.event_types": None}, {"0.nvmlDeviceRegisterEvents": 4}],
    ids=["not offered", "not supported", "no permission"],
)
def test_without_xid_events_the_other_figures_remain(
    figures: dict[str, object], library: NvmlLibrary, clock: FakeClock
) -> None:
    library.script({**figures, "0.xids": "79"})
    gpu = sampled(clock)

    gpu.read()
    gpu.sampler.close()

    assert gpu.series(catalog.DEVICE_XID_ERRORS) == {}
    assert gpu.value(catalog.DEVICE_ECC_ERRORS, "corrected") == 0
    assert library.left_open == (0, 0)


def test_close_frees_the_event_set_and_nvml_and_may_be_called_twice(
    library: NvmlLibrary, gpu: Sampled
) -> None:
    gpu.read()
    before = library.left_open

    gpu.sampler.close()
    gpu.sampler.close()

    assert before == (1, 1)
    assert library.left_open == (0, 0)


def test_a_probe_that_is_closed_reads_nothing(library: NvmlLibrary, clock: FakeClock) -> None:
    probe = nvml_device(0, now=clock)
    assert probe is not None

    probe.close()

    assert (probe.read(), probe.health()) == ({}, {})


def test_the_card_is_found_by_its_uuid_whatever_its_number(
    library: NvmlLibrary, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.script({"devices": 2, "1.uuid": "GPU-aaaaaaaa", "1.temperature": 40})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aaaaaaaa")
    gpu = sampled(clock)

    gpu.read()

    assert [labels[1] for labels in gpu.series(catalog.DEVICE_INFO)] == ["GPU-aaaaaaaa"]
    assert gpu.value(catalog.DEVICE_TEMPERATURE) == 40


def test_a_mig_device_has_its_own_uuid_and_the_address_of_its_gpu(
    library: NvmlLibrary, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.script(
        {"devices": 2, "1.uuid": "MIG-bbbb", "1.parent": 0, "1.name": "H100 MIG 1g.10gb"}
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-bbbb")
    gpu = sampled(clock)

    gpu.read()

    slice_of_gpu = ("cuda:0", "MIG-bbbb", "00000000:1B:00.0", "H100 MIG 1g.10gb", "580.95.05")
    assert gpu.series(catalog.DEVICE_INFO) == {slice_of_gpu: 1.0}
    assert gpu.series(catalog.DEVICE_ECC_ERRORS) == {}


def test_a_run_on_cpu_exports_no_series_of_health() -> None:
    recorder = Recorder()
    sampler = DeviceSampler(recorder, FailOpen(), [CpuDevice()], 0.0)

    sampler.read_devices()

    of_gpus = {catalog.DEVICE_INFO, catalog.DEVICE_LOST, catalog.DEVICE_XID_ERRORS, *HEALTH}
    assert of_gpus.isdisjoint(recorder.snapshot().values)


def test_the_bits_of_the_reasons_are_those_of_nvml(library: NvmlLibrary) -> None:
    names = {
        "power_cap": "SwPowerCap",
        "hw_slowdown": "HwSlowdown",
        "sw_thermal": "SwThermalSlowdown",
        "hw_thermal": "HwThermalSlowdown",
        "power_brake": "HwPowerBrakeSlowdown",
    }

    bits = {
        name: getattr(library.pynvml, f"nvmlClocksEventReason{nvml_name}")
        for name, nvml_name in names.items()
    }

    assert bits == gpu_health.THROTTLE_REASONS


def test_each_xid_of_the_table_has_one_row() -> None:
    numbers = [xid.number for xid in XIDS]

    assert numbers == sorted(set(numbers))
    assert "see NVIDIA's" in describe(9999)
