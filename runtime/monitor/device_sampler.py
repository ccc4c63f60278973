"""Reads utilization, power, temperature, links and health of the devices at intervals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from ...metrics.catalog import devices as device_metrics
from ...metrics.catalog.spec import MetricSpec
from ...metrics.recorder import Recorder
from ..common.fail_open import FailOpen
from ..common.gil_pauses import let_training_run
from ..devices.device_probes import DeviceProbe
from ..memory.memory_reader import Readings


class DeviceSampler:
    """Reads the device probes of a rank. Only one thread uses it.

    Attributes:
        device_readings: The last readings, by device and name.
    """

    def __init__(
        self,
        recorder: Recorder,
        fail_open: FailOpen,
        devices: Sequence[DeviceProbe],
        device_interval_seconds: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._read_at: dict[str, float] = {}  # the last time at which utilization was known
        self.device_readings: Readings = {}
        self._recorder = recorder
        self._devices = {probe.device: fail_open.wrap("device", probe.read) for probe in devices}
        self._health = {
            probe.device: fail_open.wrap("device health", probe.health) for probe in devices
        }
        self._probes, self._fail_open = devices, fail_open
        self._device_interval_seconds = device_interval_seconds
        self._device_due = 0.0
        self._published: set[_Series] = set()

    def read_devices(self) -> None:
        """Read the devices if the interval is over, and publish the readings.

        A series that is no longer read is removed: its last value would look like the current one.
        A reading of the utilization stands for the time since the reading before. If a device
        could not be read meanwhile, that time counts as neither busy nor idle.
        """
        now = self._now()
        if now < self._device_due:
            return
        self._device_due = now + self._device_interval_seconds
        readings = ((device, read()) for device, read in self._devices.items())
        self.device_readings = {device: values for device, values in readings if values}
        let_training_run()
        series = dict(self._series())
        with self._recorder.commit():
            for (spec, labels), value in series.items():
                self._recorder.set(spec, value, *labels)
            for spec, labels in self._published - series.keys():
                self._recorder.remove(spec, *labels)
            self._count_seconds(now)
        self._published = set(series)

    def _count_seconds(self, now: float) -> None:
        before, self._read_at = self._read_at, {}
        for device, values in self.device_readings.items():
            busy_ratio = values.get("utilization_ratio")
            if busy_ratio is None:
                continue
            self._read_at[device] = now
            if device in before:
                busy = min(busy_ratio, 1.0) * (now - before[device])
                idle = now - before[device] - busy
                self._recorder.add(device_metrics.DEVICE_SECONDS, busy, device, "busy")
                self._recorder.add(device_metrics.DEVICE_SECONDS, idle, device, "idle")

    def _series(self) -> Iterator[tuple[_Series, float]]:
        for device, values in self.device_readings.items():
            for reading, value in values.items():
                spec, *labels = _METRICS[reading]
                yield (spec, (device, *labels)), value
        for device, health in self._health.items():
            for (reading, *labels), value in (health() or {}).items():
                yield (_HEALTH_METRICS[reading], (device, *labels)), value

    def close(self) -> None:
        """Read the devices once more, and close all probes, even if one of them fails.

        A fault of a device may be what ends the run.
        """
        self._device_due = 0.0
        self._fail_open.call("devices", self.read_devices)
        for probe in self._probes:
            self._fail_open.call("devices", probe.close)


_Series = tuple[MetricSpec, tuple[str, ...]]
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
_HEALTH_METRICS = {
    "info": device_metrics.DEVICE_INFO,
    "lost": device_metrics.DEVICE_LOST,
    "temperature_limit_celsius": device_metrics.DEVICE_TEMPERATURE_LIMIT,
    "throttled_seconds": device_metrics.DEVICE_THROTTLED_SECONDS,
    "ecc_errors": device_metrics.DEVICE_ECC_ERRORS,
    "remapped_rows": device_metrics.DEVICE_REMAPPED_ROWS,
    "row_remap": device_metrics.DEVICE_ROW_REMAP,
    "link_errors": device_metrics.DEVICE_LINK_ERRORS,
    "xid_errors": device_metrics.DEVICE_XID_ERRORS,
}
