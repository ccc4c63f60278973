"""Reads utilization, power, temperature and links of the devices at intervals."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ...metrics.catalog import devices as device_metrics
from ...metrics.catalog.spec import MetricSpec
from ...metrics.recorder import Recorder
from ..common.fail_open import FailOpen
from ..devices.device_probes import DeviceProbe
from ..memory.memory_reader import Readings


class DeviceSampler:
    """Reads the device probes of a rank. Only the watch thread uses it.

    Attributes:
        device_readings: The last readings, by device and name.
    """

    def __init__(
        self,
        recorder: Recorder,
        fail_open: FailOpen,
        devices: Sequence[DeviceProbe],
        device_interval_seconds: float,
    ) -> None:
        self.device_readings: Readings = {}
        self._recorder = recorder
        self._devices = {probe.device: fail_open.wrap("device", probe.read) for probe in devices}
        self._probes = devices
        self._device_interval_seconds = device_interval_seconds
        self._device_due = 0.0

    def read_devices(self) -> None:
        """Read the devices if the interval is over, and publish the readings."""
        now = time.monotonic()
        if now < self._device_due:
            return
        self._device_due = now + self._device_interval_seconds
        readings = ((device, read()) for device, read in self._devices.items())
        self.device_readings = {device: values for device, values in readings if values}
        with self._recorder.commit():
            for device, values in self.device_readings.items():
                for reading, value in values.items():
                    spec, *labels = _METRICS[reading]
                    self._recorder.set(spec, value, device, *labels)

    def close(self) -> None:
        """Close the probes."""
        for probe in self._probes:
            probe.close()


_METRICS: dict[str, tuple[MetricSpec, *tuple[str, ...]]] = {
    "utilization_ratio": (device_metrics.DEVICE_UTILIZATION,),
    "sm_active_ratio": (device_metrics.DEVICE_SM_ACTIVE,),
    "power_watts": (device_metrics.DEVICE_POWER,),
    "temperature_celsius": (device_metrics.DEVICE_TEMPERATURE,),
    "clock_hertz": (device_metrics.DEVICE_CLOCK,),
    "energy_joules": (device_metrics.DEVICE_ENERGY,),
    "nvlink_sent_bytes": (device_metrics.DEVICE_LINK_BYTES, "nvlink", "sent"),
    "nvlink_received_bytes": (device_metrics.DEVICE_LINK_BYTES, "nvlink", "received"),
    "pcie_sent_bytes": (device_metrics.DEVICE_LINK_BYTES, "pcie", "sent"),
    "pcie_received_bytes": (device_metrics.DEVICE_LINK_BYTES, "pcie", "received"),
}
