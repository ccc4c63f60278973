"""Reads the health of an NVIDIA GPU by NVML: throttling, memory, links and XID errors.

Each function of the first part reads the device once, and raises NVMLError if the device, the
driver or nvidia-ml-py does not support the figure. It returns a source, which makes all later
readings. `nvml_probe.py` holds NVML open and calls the sources.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from ...metrics.catalog import devices
from ...metrics.recorder import Snapshot
from ...metrics.xid_errors import XIDS

# The name of a reading, followed by the values of its labels: ("ecc_errors", "corrected").
HealthReadings = Mapping[tuple[str, ...], float]
HealthSource = Callable[[], HealthReadings]
Clock = Callable[[], float]

# Counters of errors change rarely, and reading those of 18 NVLinks takes milliseconds.
COUNTERS_SECONDS = 15.0
# The longest time that is counted as throttled for one reading. If more time has passed, the
# device was not observed meanwhile.
LONGEST_GAP_SECONDS = 30.0
# nvml.h: bits of nvmlClocksEventReasons. The others say that clocks are low by intent: idle,
# application clocks, sync boost, display. HW_SLOWDOWN is set together with its causes HW_THERMAL
# and POWER_BRAKE.
THROTTLE_REASONS = {
    "power_cap": 0x04,
    "hw_slowdown": 0x08,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "power_brake": 0x80,
}
# nvml.h: the members of the union nvmlValue_t, by nvmlValueType_t.
_VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
# nvmlEventSetWait takes milliseconds. An event that is ready is returned at once.
_EVENT_WAIT_MILLISECONDS = 1
_MAX_EVENTS = 100  # for each reading; the others are read the next time
# nvml.h: kinds of nvmlNvLinkErrorCounter_t. The older fields of NVLink errors (fields 32 to 59) are
# not used, because Hopper answers them with 0: DataDog/datadog-agent pull request 55966.
_NVLINK_COUNTERS = {"replay": 0, "recovery": 1, "crc": 2}


def health_sources(
    nvml: Any, handle: Any, now: Clock = time.monotonic
) -> Mapping[str, Callable[[], HealthSource]]:
    """Return a function for each figure, which makes its source or raises NVMLError.

    Args:
        nvml: The module pynvml, initialized.
        handle: The device.
        now: A monotonic clock, in seconds.
    """
    counters: dict[str, Callable[[], HealthSource]] = {
        "ECC errors (corrected)": partial(_ecc, nvml, handle, "corrected", 0),
        "ECC errors (uncorrected)": partial(_ecc, nvml, handle, "uncorrected", 1),
        "remapped rows": partial(_remapped_rows, nvml, handle),
        "PCIe replays": partial(_pcie_replays, nvml, handle),
        **{
            f"NVLink errors ({kind})": partial(_nvlink_errors, nvml, handle, kind)
            for kind in _NVLINK_COUNTERS
        },
    }
    return {
        "throttle reasons": partial(_throttled, nvml, handle, now),
        "temperature limit": partial(_temperature_limit, nvml, handle),
        **{name: partial(Seldom, make, now) for name, make in counters.items()},
    }


def asks_for_drain(snapshot: Snapshot) -> bool:
    """Return whether a GPU is lost, has lost data, or has reported an XID that asks for a reset."""
    errors = snapshot.values.get(devices.DEVICE_ECC_ERRORS, {})
    xids = {number for _, number in snapshot.values.get(devices.DEVICE_XID_ERRORS, {})}
    return (
        snapshot.total(devices.DEVICE_LOST) > 0
        or any(count for (_, kind), count in errors.items() if kind == "uncorrected")
        or any(str(xid.number) in xids for xid in XIDS if xid.drain)
    )


def identity(nvml: Any, handle: Any) -> HealthReadings:
    """Return the reading "info": UUID, address on the PCI bus, name and driver of the device.

    A part that NVML does not give is empty. Without a UUID there is no reading. The address of a
    MIG device is that of its GPU.
    """

    def text(ask: Callable[[], Any]) -> str:
        try:
            return text_of(ask())
        except nvml.NVMLError:
            return ""

    def bus_id(device: Any) -> str:
        return text(lambda: call(nvml, "nvmlDeviceGetPciInfo", device).busId)

    def parent_bus_id() -> str:
        parent = call(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        return bus_id(parent)

    uuid = text(lambda: call(nvml, "nvmlDeviceGetUUID", handle))
    if not uuid:
        return {}
    address = bus_id(handle) or text(parent_bus_id)
    name = text(lambda: call(nvml, "nvmlDeviceGetName", handle))
    driver = text(lambda: call(nvml, "nvmlSystemGetDriverVersion"))
    return {("info", uuid, address, name, driver): 1.0}


def call(nvml: Any, name: str, *arguments: Any) -> Any:
    """Call a function of NVML. A function that nvidia-ml-py lacks counts as not supported."""
    function = getattr(nvml, name, None)
    if function is None:
        raise nvml.NVMLError(nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    return function(*arguments)


def text_of(answer: str | bytes) -> str:
    """Return a text; pynvml before 11.5 returns bytes."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)


def field_value(nvml: Any, handle: Any, constant: str, scope: int = 0) -> float:
    """Return the value of one of NVML's fields.

    Raises:
        NVMLError: The device does not support the field, or nvidia-ml-py does not name it.
    """
    number = getattr(nvml, constant, None)
    if number is None:
        raise nvml.NVMLError(nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    (answer,) = nvml.nvmlDeviceGetFieldValues(handle, [(number, scope)])
    if answer.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(answer.nvmlReturn)
    return number_of(answer)


def number_of(answer: Any) -> float:
    """Return the member of the union that a field's answer names."""
    return float(getattr(answer.value, _VALUE_MEMBERS[answer.valueType]))


class RunningTotal:
    """Adds up the growth of a driver's counter since the first reading.

    If the counter falls, it counts from 0 again: the driver was reloaded, or the counter wrapped.
    The growth between the last reading and that moment is lost. Guessing the width of the counter
    could add growth that never was.

    Args:
        first: The first reading.

    Attributes:
        total: The growth up to the last reading.
    """

    def __init__(self, first: float) -> None:
        self.total = 0.0
        self._last = first

    def update(self, now: float) -> float:
        """Return the growth since the first reading, given the counter's value now."""
        self.total += now - self._last if now >= self._last else now
        self._last = now
        return self.total


class XidEvents:
    """Counts the XID errors of a device from now on, by number.

    Args:
        nvml: The module pynvml, initialized.
        handle: The device.
        cleanup: Frees the event set when it closes.

    Raises:
        NVMLError: The device reports no XID errors, or this user may not see them. NVML does not
            report the events of a single MIG device.
    """

    def __init__(self, nvml: Any, handle: Any, cleanup: ExitStack) -> None:
        self.counts: Counter[int] = Counter()
        self._nvml = nvml
        kind = nvml.nvmlEventTypeXidCriticalError
        if not call(nvml, "nvmlDeviceGetSupportedEventTypes", handle) & kind:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self._events = nvml.nvmlEventSetCreate()
        try:
            nvml.nvmlDeviceRegisterEvents(handle, kind, self._events)
        except nvml.NVMLError:
            nvml.nvmlEventSetFree(self._events)
            raise
        cleanup.callback(nvml.nvmlEventSetFree, self._events)

    def poll(self) -> list[int]:
        """Count the events that have arrived, and return their XID numbers.

        Waits one millisecond for an event, on the thread of monitoring that calls it.
        """
        numbers: list[int] = []
        for _ in range(_MAX_EVENTS):
            try:
                event = self._nvml.nvmlEventSetWait(self._events, _EVENT_WAIT_MILLISECONDS)
            except self._nvml.NVMLError:  # a timeout: nothing has happened
                break
            if event.eventType == self._nvml.nvmlEventTypeXidCriticalError:
                numbers.append(int(event.eventData))
        self.counts.update(numbers)
        return numbers


class Seldom:
    """A source that reads another one at most every 15 s, and repeats its readings.

    Args:
        make: Makes the other source.
        now: A monotonic clock, in seconds.
    """

    def __init__(self, make: Callable[[], HealthSource], now: Clock) -> None:
        self._source, self._now = make(), now
        self._due = -math.inf
        self._last: HealthReadings = {}

    def __call__(self) -> HealthReadings:
        """Return the readings, of now or of up to 15 s ago."""
        moment = self._now()
        if moment >= self._due:
            # If it fails, nothing is repeated.
            self._due, self._last = moment + COUNTERS_SECONDS, {}
            self._last = self._source()
        return self._last

    def expire(self) -> None:
        """Read at the next call."""
        self._due = -math.inf


def _ecc(nvml: Any, handle: Any, kind: str, error_type: int) -> HealthSource:
    """Return the source of the ECC errors from now on. The driver counts from its own start."""

    def ask() -> float:
        scope = nvml.NVML_VOLATILE_ECC
        return float(call(nvml, "nvmlDeviceGetTotalEccErrors", handle, error_type, scope))

    total = RunningTotal(ask())
    return lambda: {("ecc_errors", kind): total.update(ask())}


def _remapped_rows(nvml: Any, handle: Any) -> HealthSource:
    def read() -> HealthReadings:
        corrected, uncorrected, pending, failed = call(nvml, "nvmlDeviceGetRemappedRows", handle)
        return {
            ("remapped_rows", "corrected"): float(corrected),
            ("remapped_rows", "uncorrected"): float(uncorrected),
            ("row_remap", "pending"): float(bool(pending)),
            ("row_remap", "failed"): float(bool(failed)),
        }

    read()
    return read


def _pcie_replays(nvml: Any, handle: Any) -> HealthSource:
    """Return the source of the PCIe replays from now on. The driver counts from its own start."""

    def ask() -> float:
        return float(call(nvml, "nvmlDeviceGetPcieReplayCounter", handle))

    total = RunningTotal(ask())
    return lambda: {("link_errors", "pcie", "replay"): total.update(ask())}


def _nvlink_errors(nvml: Any, handle: Any, kind: str) -> HealthSource:
    """Return the source of one kind of error from now on, summed over the device's NVLinks.

    Blackwell counts the recoveries of a link in a field of their own.
    """

    def by_counter(link: int) -> float:
        number = _NVLINK_COUNTERS[kind]
        return float(call(nvml, "nvmlDeviceGetNvLinkErrorCounter", handle, link, number))

    def by_field(link: int) -> float:
        return field_value(
            nvml, handle, "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS", scope=link
        )

    for count in (by_counter, by_field) if kind == "recovery" else (by_counter,):
        if totals := _totals_by_link(nvml, count):
            return partial(_sum_over, nvml, totals, count, ("link_errors", "nvlink", kind))
    raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)


def _totals_by_link(nvml: Any, count: Callable[[int], float]) -> dict[int, RunningTotal]:
    """Return a total for each link of the device. An administrator may reset a single link's."""
    totals: dict[int, RunningTotal] = {}
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            totals[link] = RunningTotal(count(link))
        except nvml.NVMLError:  # the device has no such link
            continue
    return totals


def _sum_over(
    nvml: Any,
    totals: Mapping[int, RunningTotal],
    count: Callable[[int], float],
    reading: tuple[str, ...],
) -> HealthReadings:
    """Sum over the links. One that does not answer, such as one that is down, keeps its total."""
    failures = []
    for link, total in totals.items():
        try:
            total.update(count(link))
        except nvml.NVMLError as error:
            failures.append(error)
    if len(failures) == len(totals):
        raise failures[0]
    return {reading: sum(total.total for total in totals.values())}


def _temperature_limit(nvml: Any, handle: Any) -> HealthSource:
    """Return the source of the core temperature at which the hardware lowers the clock.

    From Ada on NVML gives no limit but a margin: the degrees that the device may still get hotter.
    The slowdown begins at a margin of its own, usually a few degrees below 0. The limit is then
    derived at each reading.
    """

    def fixed() -> HealthReadings:
        threshold = nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        celsius = call(nvml, "nvmlDeviceGetTemperatureThreshold", handle, threshold)
        if not celsius:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        return {("temperature_limit_celsius",): float(celsius)}

    def derived() -> HealthReadings:
        begin = field_value(nvml, handle, "NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT")
        margin = call(nvml, "nvmlDeviceGetMarginTemperature", handle)
        now = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        return {("temperature_limit_celsius",): float(now + margin - begin)}

    try:
        derived()
    except nvml.NVMLError:
        fixed()
        return fixed
    return derived


def _throttled(nvml: Any, handle: Any, now: Clock) -> HealthSource:
    """Return the source of the seconds with a lowered clock since now, by reason.

    The reasons of the moment count for the time since the last reading. Drivers before 535 have
    the older name of the function.
    """

    def ask(kind: str) -> int:
        try:
            return int(call(nvml, f"nvmlDeviceGet{kind}ClocksEventReasons", handle))
        except nvml.NVMLError:
            return int(call(nvml, f"nvmlDeviceGet{kind}ClocksThrottleReasons", handle))

    ask("Current")
    try:
        supported = ask("Supported")
    except nvml.NVMLError:
        supported = sum(THROTTLE_REASONS.values())
    seconds = {name: 0.0 for name, bit in THROTTLE_REASONS.items() if bit & supported}
    last = now()

    def read() -> HealthReadings:
        nonlocal last
        reasons, moment = ask("Current"), now()
        gap = min(moment - last, LONGEST_GAP_SECONDS)
        last = moment
        for name in seconds:
            seconds[name] += gap if reasons & THROTTLE_REASONS[name] else 0.0
        return {("throttled_seconds", name): value for name, value in seconds.items()}

    return read
