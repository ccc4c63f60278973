"""Metrics of devices: utilization, power, temperature, clock, energy and link traffic."""

from __future__ import annotations

from .labels import DEVICE
from .spec import Label, counter, gauge

DEVICE_UTILIZATION = gauge(
    "device_utilization_ratio",
    "Share of time that the device was busy; on cpu the process's share of the cores it may use.",
    DEVICE,
)
DEVICE_SM_ACTIVE = gauge(
    "device_sm_active_ratio", "Share of time that a multiprocessor was active, on average.", DEVICE
)
DEVICE_POWER = gauge("device_power_watts", "Power draw.", DEVICE)
DEVICE_TEMPERATURE = gauge("device_temperature_celsius", "Core temperature.", DEVICE)
DEVICE_CLOCK = gauge("device_clock_hertz", "Clock of the multiprocessors or the CPU.", DEVICE)
DEVICE_ENERGY = counter("device_energy_joules_total", "Energy since monitoring started.", DEVICE)
DEVICE_LINK_BYTES = counter(
    "device_link_bytes_total",
    "Bytes over the device's links since monitoring started.",
    DEVICE,
    Label(name="link", values=("nvlink", "pcie")),
    Label(name="direction", values=("sent", "received")),
)

METRICS = (
    DEVICE_UTILIZATION,
    DEVICE_SM_ACTIVE,
    DEVICE_POWER,
    DEVICE_TEMPERATURE,
    DEVICE_CLOCK,
    DEVICE_ENERGY,
    DEVICE_LINK_BYTES,
)
