"""Metrics of devices: utilization, power, temperature, clock, energy and link traffic."""

from __future__ import annotations

from .labels import DEVICE
from .spec import EVERY_SERIES, Label, counter, gauge, info

DEVICE_UTILIZATION = gauge(
    "device_utilization_ratio",
    "Share of time that the device was busy; on cpu the process's share of the cores it may use.",
    DEVICE,
    lean=EVERY_SERIES,
)
DEVICE_SM_ACTIVE = gauge(
    "device_sm_active_ratio", "Share of time that a multiprocessor was active, on average.", DEVICE
)
DEVICE_POWER = gauge("device_power_watts", "Power draw.", DEVICE)
DEVICE_TEMPERATURE = gauge(
    "device_temperature_celsius",
    "Core temperature.",
    DEVICE,
    lean=EVERY_SERIES,
)
DEVICE_CLOCK = gauge("device_clock_hertz", "Clock of the multiprocessors or the CPU.", DEVICE)
DEVICE_ENERGY = counter("device_energy_joules_total", "Energy since monitoring started.", DEVICE)
DEVICE_LINK_BYTES = counter(
    "device_link_bytes_total",
    "Bytes over the device's links since monitoring started.",
    DEVICE,
    Label(name="link", values=("nvlink", "pcie")),
    Label(name="direction", values=("sent", "received")),
)

DEVICE_INFO = info(
    "device_info",
    "1; the labels identify the card: UUID and address on the PCI bus as NVML gives them.",
    DEVICE,
    Label(name="uuid"),
    Label(name="pci_bus_id"),
    Label(name="name"),
    Label(name="driver"),
    lean=EVERY_SERIES,
)
# Health of GPUs, from NVML. A figure that the card does not have is not served.
DEVICE_TEMPERATURE_LIMIT = gauge(
    "device_temperature_limit_celsius",
    "Core temperature at which the device lowers its clock.",
    DEVICE,
    lean=EVERY_SERIES,
)
DEVICE_THROTTLED_SECONDS = counter(
    "device_throttled_seconds_total",
    "Seconds since monitoring started in which the clock was lowered, by reason.",
    DEVICE,
    Label(
        name="reason",
        values=("power_cap", "hw_slowdown", "hw_thermal", "sw_thermal", "power_brake"),
    ),
    lean=EVERY_SERIES,
)
DEVICE_ECC_ERRORS = counter(
    "device_ecc_errors_total",
    "Memory errors since the driver was loaded.",
    DEVICE,
    Label(name="kind", values=("corrected", "uncorrected")),
    lean=EVERY_SERIES,
)
DEVICE_REMAPPED_ROWS = gauge(
    "device_remapped_rows",
    "Rows of memory that the device replaced after errors, over its lifetime.",
    DEVICE,
    Label(name="kind", values=("corrected", "uncorrected")),
)
DEVICE_ROW_REMAP = gauge(
    "device_row_remap",
    "1 if a row remap is pending until the device is reset, or has failed; 0 otherwise.",
    DEVICE,
    Label(name="state", values=("pending", "failed")),
    lean=EVERY_SERIES,
)
DEVICE_LINK_ERRORS = counter(
    "device_link_errors_total",
    "Errors of the device's links since the driver was loaded.",
    DEVICE,
    Label(name="link", values=("nvlink", "pcie")),
    Label(name="kind", values=("crc", "replay", "recovery")),
    lean=EVERY_SERIES,
)
DEVICE_XID_ERRORS = counter(
    "device_xid_errors_total",
    "XID errors of the device since monitoring started, by number.",
    DEVICE,
    Label(name="xid"),
    lean=EVERY_SERIES,
)
DEVICE_LOST = gauge(
    "device_lost",
    "1 if the driver no longer reaches the device, or must reset it first; 0 otherwise.",
    DEVICE,
    lean=EVERY_SERIES,
)

METRICS = (
    DEVICE_INFO,
    DEVICE_UTILIZATION,
    DEVICE_SM_ACTIVE,
    DEVICE_POWER,
    DEVICE_TEMPERATURE,
    DEVICE_CLOCK,
    DEVICE_ENERGY,
    DEVICE_LINK_BYTES,
    DEVICE_TEMPERATURE_LIMIT,
    DEVICE_THROTTLED_SECONDS,
    DEVICE_ECC_ERRORS,
    DEVICE_REMAPPED_ROWS,
    DEVICE_ROW_REMAP,
    DEVICE_LINK_ERRORS,
    DEVICE_XID_ERRORS,
    DEVICE_LOST,
)
