"""Reads memory and devices beside the training, no oftener than the budget allows."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..metrics.catalog import devices as device_metrics
from ..metrics.catalog.spec import MetricSpec
from ..metrics.recorder import Recorder
from .closed_step import Readings
from .devices.probe import DeviceProbe
from .hooks import Hooks
from .memory.probe import MemoryProbe

# A reading costs 0.1 ms CPU where caches are cold, and all our threads may take 3 ms a second. The
# kernel keeps peaks from one reading to the next, so that shorter steps lose none.
MEMORY_SECONDS = 0.25


class Sampler:
    """Holds the probes of one rank. Used on the watch thread alone.

    Attributes:
        device_readings: What the devices last read, by device and reading.
    """

    def __init__(
        self,
        recorder: Recorder,
        hooks: Hooks,
        memory: Sequence[MemoryProbe],
        devices: Sequence[DeviceProbe],
        device_seconds: float,
    ) -> None:
        self.device_readings: Readings = {}
        self._recorder = recorder
        self._memory = {probe.device: hooks.guard("memory", probe.read) for probe in memory}
        self._devices = {probe.device: hooks.guard("device", probe.read) for probe in devices}
        self._probes = devices
        self._device_seconds = device_seconds
        self._memory_due = self._device_due = 0.0

    def read_memory(self) -> Readings:
        """Return bytes by device and state; nothing where the last reading is too fresh."""
        now = time.monotonic()
        if now < self._memory_due:
            return {}
        self._memory_due = now + MEMORY_SECONDS
        readings = ((device, read()) for device, read in self._memory.items())
        return {device: states for device, states in readings if states}

    def read_devices(self) -> None:
        """Read the devices, where that is due, and publish what they say."""
        now = time.monotonic()
        if now < self._device_due:
            return
        self._device_due = now + self._device_seconds
        readings = ((device, read()) for device, read in self._devices.items())
        self.device_readings = {device: values for device, values in readings if values}
        with self._recorder.commit():
            for device, values in self.device_readings.items():
                for reading, value in values.items():
                    spec, *labels = _METRICS[reading]
                    self._recorder.set(spec, value, device, *labels)

    def close(self) -> None:
        """Give the devices back."""
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
