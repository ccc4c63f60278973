"""Devices over ranks and time."""

from __future__ import annotations

from ...metrics.catalog import devices
from ..promql import by, select
from .rule import aggregated, recorded, summed_rate

DEVICE_UTILIZATION = recorded(
    devices.DEVICE_UTILIZATION,
    "avg5m",
    lambda timing: by(
        "avg", f"avg_over_time({select(devices.DEVICE_UTILIZATION)}[{timing.short}])", "device"
    ),
    "device",
)
DEVICE_UTILIZATION_BY_RANK = recorded(
    devices.DEVICE_UTILIZATION,
    "avg5m",
    lambda timing: by(
        "avg",
        f"avg_over_time({select(devices.DEVICE_UTILIZATION)}[{timing.short}])",
        "rank",
        "device",
    ),
    "rank",
    "device",
)
POWER = aggregated(devices.DEVICE_POWER, "sum")

# For dashboards: of a thousand ranks, as lines over time, the raw series would be too many.
SM_ACTIVE = aggregated(devices.DEVICE_SM_ACTIVE, "avg", "device")
TEMPERATURE = aggregated(devices.DEVICE_TEMPERATURE, "max", "device")
CLOCK = aggregated(devices.DEVICE_CLOCK, "min", "device")  # a throttled device is the slowest
LINK_BYTES_RATE = summed_rate(devices.DEVICE_LINK_BYTES, "link", "direction")

RULES = (
    DEVICE_UTILIZATION,
    DEVICE_UTILIZATION_BY_RANK,
    POWER,
    SM_ACTIVE,
    TEMPERATURE,
    CLOCK,
    LINK_BYTES_RATE,
)
