"""Defines the protocol of device probes, and chooses this machine's probe by kind of device.

A device probe reads utilization, power, temperature and link traffic. `memory_probes.py` contains
the memory probes. This module also returns a device's peak FLOP/s and its hardware id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ..common import accelerator
from .cpu import CpuDevice
from .gpu_health import HealthReadings
from .nvml_probe import nvml_device
from .peak_flops import gpu_peak_flops_per_second, measure_cpu_flops_per_second

# The probe of each kind of accelerator. To add a kind, write a `DeviceProbe` in a file next to
# nvml_probe.py. A kind without a row is not read. ROCm also has the kind "cuda", but is not read,
# because it has no NVML.
_PROBES = {"cuda": nvml_device}


class DeviceProbe(Protocol):
    """Reads utilization, power and other state of one device.

    Attributes:
        device: The name of the device, such as "cuda:0" or "cpu".
    """

    device: str

    def read(self) -> Mapping[str, float]:
        """Return the current readings. Unknown readings are absent.

        Keys: utilization_ratio, sm_active_ratio, power_watts, temperature_celsius, clock_hertz;
        energy_joules, nvlink_sent_bytes, nvlink_received_bytes, pcie_sent_bytes and
        pcie_received_bytes are totals since the probe was made.
        """

    def health(self) -> HealthReadings:
        """Return the readings of the device's health. Unknown readings are absent.

        A key is the name of a reading, followed by the values of its labels:

        - ("info", uuid, pci_bus_id, name, driver): 1
        - ("lost",): 1 while the driver does not reach the device, otherwise 0
        - ("temperature_limit_celsius",)
        - ("throttled_seconds", reason): since the probe was made
        - ("ecc_errors", kind) and ("link_errors", link, kind): since the probe was made
        - ("remapped_rows", kind) and ("row_remap", state): over the device's lifetime
        - ("xid_errors", number): since the probe was made
        """

    def close(self) -> None:
        """Release the device. Later readings are empty or unchanged. Safe to call twice."""


def device_probes(*, device_index: int | None) -> list[DeviceProbe]:
    """Return the probe of this rank's device, or no probe if the accelerator cannot be read.

    Args:
        device_index: torch's index of the accelerator this rank trains on; None on CPU.
    """
    if device_index is None:
        return [CpuDevice()]
    make = _PROBES.get(accelerator.current.kind)
    probe = None if make is None else make(device_index)
    return [] if probe is None else [probe]


def peak_flops_per_second(*, device_index: int | None) -> float | None:
    """Return the peak of this rank's device in FLOP/s, or None if it is not known.

    A GPU is looked up in a table. A CPU is measured, which takes about 40 ms. Call this function
    before training starts.

    Args:
        device_index: torch's index of the accelerator this rank trains on; None on CPU.
    """
    if device_index is None:
        return measure_cpu_flops_per_second()
    return gpu_peak_flops_per_second(accelerator.current.device_name(device_index))


def hardware_ids(*, device_index: int | None) -> dict[str, str]:
    """Return the identifier of this rank's GPU on its host, by device. Empty on CPU.

    Args:
        device_index: torch's index of the accelerator this rank trains on; None on CPU.
    """
    device = accelerator.current
    if device_index is None or not device.is_available():
        return {}
    return {f"{device.kind}:{device_index}": device.hardware_id(device_index)}
