"""Metrics of devices: utilization, power, temperature, clock, energy and link traffic."""

from __future__ import annotations

from ..thresholds import DEVICE_UTILIZATION_LOW
from .labels import DEVICE
from .spec import EVERY_SERIES, Label, Lean, counter, gauge, info

DEVICE_UTILIZATION = gauge(
    "device_utilization_ratio",
    "Share of time that the device was busy; on cpu the process's share of the cores it may use.",
    DEVICE,
    usual=f"Above 0.9 on GPUs while training. Worry below {DEVICE_UTILIZATION_LOW:g} for half "
    "an hour. It says nothing about efficiency: see mfu_ratio.",
)
DEVICE_SECONDS = counter(
    "device_seconds_total",
    "Seconds in which the device was observed, by whether it was busy: device_utilization_ratio "
    "added up over time.",
    DEVICE,
    Label(name="state", values=("busy", "idle")),
    lean=EVERY_SERIES,
    usual="On GPUs `busy` is above 0.9 of both while training. Its growth over any period is exact "
    "enough to compare periods, unlike single values of device_utilization_ratio.",
)
DEVICE_SM_ACTIVE = gauge(
    "device_sm_active_ratio",
    "Share of time that a multiprocessor was active, on average.",
    DEVICE,
    usual="0.5 to 0.9 while training.",
)
DEVICE_POWER = gauge(
    "device_power_watts",
    "Power draw.",
    DEVICE,
    usual="0.7 to 1 of the card's limit while training (700 W for H100 SXM). A rank far below"
    " the others waits or is throttled.",
)
DEVICE_TEMPERATURE = gauge(
    "device_temperature_celsius",
    "Core temperature.",
    DEVICE,
    lean=EVERY_SERIES,
    usual="40 to 80. Worry within 5 degrees of device_temperature_limit_celsius.",
)
DEVICE_CLOCK = gauge(
    "device_clock_hertz",
    "Clock of the multiprocessors or the CPU.",
    DEVICE,
    usual="Near the card's maximum, 1.4e9 to 2e9. A rank far below the others is throttled.",
)
DEVICE_ENERGY = counter(
    "device_energy_joules_total",
    "Energy since monitoring started.",
    DEVICE,
    usual="A steady rate, equal to device_power_watts.",
)
DEVICE_LINK_BYTES = counter(
    "device_link_bytes_total",
    "Bytes over the device's links since monitoring started.",
    DEVICE,
    Label(name="link", values=("nvlink", "pcie")),
    Label(name="direction", values=("sent", "received")),
    usual="A steady rate while training.",
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
    usual="Constant. Another UUID for the same rank means that the run moved to another card.",
)
# Health of GPUs, from NVML. A figure that the card does not have is not served.
DEVICE_TEMPERATURE_LIMIT = gauge(
    "device_temperature_limit_celsius",
    "Core temperature at which the device lowers its clock.",
    DEVICE,
    lean=EVERY_SERIES,
    usual="Constant, 80 to 95 on most cards.",
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
    usual="`power_cap` grows on cards at full load, which is normal. Worry about any growth "
    "of `hw_thermal`, `hw_slowdown` or `power_brake`.",
)
DEVICE_ECC_ERRORS = counter(
    "device_ecc_errors_total",
    "Memory errors since monitoring started.",
    DEVICE,
    Label(name="kind", values=("corrected", "uncorrected")),
    lean=Lean(only={"kind": ("uncorrected",)}),
    usual="0 `uncorrected`. Some `corrected` ones over weeks are normal; many per hour "
    "announce a failure.",
)
DEVICE_REMAPPED_ROWS = gauge(
    "device_remapped_rows",
    "Rows of memory that the device replaced after errors, over its lifetime.",
    DEVICE,
    Label(name="kind", values=("corrected", "uncorrected")),
    usual="0 or a few. `uncorrected` ones: reset the card at the next pause, and replace it "
    "if more follow.",
)
DEVICE_ROW_REMAP = gauge(
    "device_row_remap",
    "1 if a row remap is pending until the device is reset, or has failed; 0 otherwise.",
    DEVICE,
    Label(name="state", values=("pending", "failed")),
    lean=EVERY_SERIES,
    usual="0. `pending`: reset the card at the next pause. `failed`: replace it.",
)
DEVICE_LINK_ERRORS = counter(
    "device_link_errors_total",
    "Errors of the device's links since monitoring started.",
    DEVICE,
    Label(name="link", values=("nvlink", "pcie")),
    Label(name="kind", values=("crc", "replay", "recovery")),
    lean=EVERY_SERIES,
    usual="0. Steady growth: cable, connector or switch.",
)
DEVICE_XID_ERRORS = counter(
    "device_xid_errors_total",
    "XID errors of the device since monitoring started, by number.",
    DEVICE,
    Label(name="xid"),
    lean=EVERY_SERIES,
    usual="0. See the table of XID numbers in the runbook: 13, 31 and 43 are usually the "
    "program, 48, 63, 64, 74, 79, 94 and 95 the card.",
)
DEVICE_LOST = gauge(
    "device_lost",
    "1 if the driver no longer reaches the device, or must reset it first; 0 otherwise.",
    DEVICE,
    lean=EVERY_SERIES,
    usual="0. At 1, the host must be drained.",
)

METRICS = (
    DEVICE_INFO,
    DEVICE_UTILIZATION,
    DEVICE_SECONDS,
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
