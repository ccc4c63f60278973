"""NVML on a real GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from zerowatch.runtime.devices.device_probes import device_probes, peak_flops_per_second

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def keep_busy(seconds: float) -> None:
    matrix = torch.ones(4096, 4096, device="cuda", dtype=torch.float16)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for _ in range(50):  # one product is shorter than the host's part of it
            torch.mm(matrix, matrix)
        torch.cuda.synchronize()


def test_nvml_s_device_is_torch_s_device(record_property: Callable[[str, object], None]) -> None:
    import pynvml

    (probe,) = device_probes(device_index=torch.cuda.current_device())
    try:
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)

        assert pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        probe.read()
        readings = probe.read()
        record_property("readings", sorted(readings))
        record_property("health", sorted({key[0] for key in probe.health()}))
        assert {"utilization_ratio", "power_watts", "temperature_celsius"} <= set(readings)
    finally:
        probe.close()


def test_a_busy_gpu_reads_busy_and_uses_energy() -> None:
    (probe,) = device_probes(device_index=0)
    try:
        keep_busy(2.0)
        readings = probe.read()
    finally:
        probe.close()

    assert readings["utilization_ratio"] > 0.8
    assert 10 < readings["power_watts"] < 2000
    assert 10 < readings["temperature_celsius"] < 110
    assert 1e8 < readings["clock_hertz"] < 4e9
    if "energy_joules" in readings:
        assert 10 < readings["energy_joules"] < 2 * 2000
    if "sm_active_ratio" in readings:
        assert 0.5 < readings["sm_active_ratio"] <= 1.0


def test_a_counter_of_bytes_that_wraps_is_left_out(
    record_property: Callable[[str, object], None],
) -> None:
    import pynvml

    (probe,) = device_probes(device_index=0)
    try:
        is_read = "pcie_received_bytes" in probe.read()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        (answer,) = pynvml.nvmlDeviceGetFieldValues(
            handle, [pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES]
        )
    finally:
        probe.close()

    is_offered = answer.nvmlReturn == pynvml.NVML_SUCCESS
    has_32_bits = answer.valueType == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
    record_property("PCIe counter", {"offered": is_offered, "32 bits": has_32_bits})
    assert is_read == (is_offered and not has_32_bits)


def test_bytes_copied_from_the_host_show_on_pcie_where_it_is_counted() -> None:
    (probe,) = device_probes(device_index=0)
    try:
        before = probe.read()
        if "pcie_received_bytes" not in before:
            pytest.skip("this GPU or driver has no PCIe byte counters of 64 bits")
        host = torch.ones(2**28, dtype=torch.uint8).pin_memory()
        for _ in range(8):
            host.to("cuda")
        torch.cuda.synchronize()
        time.sleep(0.2)
        received = probe.read()["pcie_received_bytes"] - before["pcie_received_bytes"]
    finally:
        probe.close()

    assert 0.8 * 8 * 2**28 < received < 2 * 8 * 2**28


def test_a_measured_product_stays_below_the_table_s_peak() -> None:
    peak = peak_flops_per_second(device_index=0)
    if peak is None:
        pytest.skip(f"{torch.cuda.get_device_name(0)} is not in the table")
    side = 8192
    matrix = torch.randn(side, side, device="cuda", dtype=torch.float16)
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()

    started = time.perf_counter()
    for _ in range(20):
        torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    rate = 20 * 2 * side**3 / (time.perf_counter() - started)

    assert 0.3 * peak < rate < peak


def test_the_health_of_a_real_gpu_is_read_in_plausible_figures() -> None:
    import pynvml

    (probe,) = device_probes(device_index=torch.cuda.current_device())
    try:
        probe.read()
        time.sleep(1.0)
        readings = probe.health()
        (card,) = (key for key in readings if key[0] == "info")
        handle = pynvml.nvmlDeviceGetHandleByUUID(card[1])
    finally:
        probe.close()

    assert handle
    assert str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) in card[1]
    assert all(card[2:])
    assert readings["lost",] == 0
    limit = readings.get(("temperature_limit_celsius",))
    assert limit is None or 70 < limit < 120
    throttled = [value for key, value in readings.items() if key[0] == "throttled_seconds"]
    assert throttled
    assert all(0 <= value < 30 for value in throttled)
    assert all(value >= 0 for key, value in readings.items() if key[0].endswith("_errors"))
    assert not [key for key in readings if key[0] == "xid_errors"]


def test_reading_the_health_of_a_real_gpu_takes_a_few_milliseconds() -> None:
    (probe,) = device_probes(device_index=0)
    try:
        probe.health()
        started = time.perf_counter()
        for _ in range(10):
            probe.health()
        seconds = (time.perf_counter() - started) / 10
    finally:
        probe.close()

    assert seconds < 0.01
