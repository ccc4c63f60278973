"""The protocol of device probes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class DeviceProbe(Protocol):
    """Reads the state of one device."""

    device: str

    def read(self) -> Mapping[str, float]:
        """Return the current readings; unknown ones are absent.

        Keys: utilization_ratio, sm_active_ratio, power_watts, temperature_celsius, clock_hertz;
        energy_joules, nvlink_sent_bytes, nvlink_received_bytes, pcie_sent_bytes and
        pcie_received_bytes are totals since the probe was made.
        """

    def close(self) -> None:
        """Release the device; safe to call twice. Later readings are empty or unchanged."""
