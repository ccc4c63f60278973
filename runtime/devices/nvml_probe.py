"""Reads an NVIDIA GPU by NVML: utilization, power, temperature, clock, energy, traffic and health.

`gpu_health.py` contains the readings of its health.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from ...metrics.xid_errors import BY_NUMBER, describe
from ..common import accelerator
from .gpu_health import (
    Clock,
    HealthReadings,
    RunningTotal,
    Seldom,
    XidEvents,
    health_sources,
    identity,
    number_of,
    text_of,
)

logger = logging.getLogger(__name__)

Key = TypeVar("Key")
T = TypeVar("T")
Source = Callable[[], Mapping[str, float]]

_ORDINAL = re.compile(r"\d+")
_ALL_LINKS = 0xFFFFFFFF  # nvml.h: scopeId UINT_MAX sums over all links
# Reading, NVML's field, scope, bytes per unit. All fields are totals. Fields of 32 bits are left
# out: PCIe 5 moves 4 GiB in 70 ms, so such a counter wraps many times between two readings.
# nvmlDeviceGetPcieThroughput is not used, because it returns a rate over 20 ms and blocks for
# 20 ms.
_LINK_FIELDS = (
    ("nvlink_sent_bytes", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", _ALL_LINKS, 1024),
    ("nvlink_received_bytes", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", _ALL_LINKS, 1024),
    ("pcie_sent_bytes", "NVML_FI_DEV_PCIE_COUNT_TX_BYTES", 0, 1),
    ("pcie_received_bytes", "NVML_FI_DEV_PCIE_COUNT_RX_BYTES", 0, 1),
)
# nvml.h: GPU_IS_LOST, RESET_REQUIRED and GPU_NOT_FOUND. No function of the device works then.
_LOST = {15, 16, 28}
_GAUGES: Mapping[str, Callable[[Any, Any], float]] = {
    "utilization_ratio": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "power_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "temperature_celsius": lambda nvml, gpu: float(
        nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
    ),
    "clock_hertz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM) * 1e6,
}


def nvml_device(device_index: int, now: Clock = time.monotonic) -> NvmlDevice | None:
    """Return the probe of the GPU with torch's index, or None if NVML cannot access it.

    Args:
        device_index: torch's index.
        now: A monotonic clock, in seconds.
    """
    device = f"cuda:{device_index}"
    pynvml = _opened(device, logging.INFO)
    if pynvml is None:
        return None
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    uuid = accelerator.device_uuid(device_index)
    is_slice = accelerator.device_is_slice(device_index)
    handle = _find_handle(pynvml, device_index, uuid=uuid, variable=variable, is_slice=is_slice)
    if handle is None:
        pynvml.nvmlShutdown()
        logger.info(
            "%s: no utilization, power or temperature: NVML has no such device "
            "(CUDA_VISIBLE_DEVICES=%s)",
            device,
            variable,
        )
        return None
    return NvmlDevice(device, pynvml, handle, now)


def nvml_device_of(device: str, uuid: str, now: Clock = time.monotonic) -> NvmlDevice | None:
    """Return the probe of a GPU that another process trains on, or None if NVML cannot access it.

    Args:
        device: The name of the device in that process, such as "cuda:0".
        uuid: `NvmlDevice.uuid` of a probe in that process.
        now: A monotonic clock, in seconds.

    Examples:
        >>> nvml_device_of("cuda:0", "GPU-5f3b71c2-8b0e-4f6d-9c3a-2a7d5a9b8a10")
        <zerowatch.runtime.devices.nvml_probe.NvmlDevice object at 0x7f3c5c0b9d50>
    """
    pynvml = _opened(device, logging.WARNING)  # the process of the ranks could open it
    if pynvml is None:
        return None
    try:
        return NvmlDevice(device, pynvml, _handle_of(pynvml, uuid), now)
    except pynvml.NVMLError as error:
        pynvml.nvmlShutdown()
        logger.warning(
            "%s: no utilization, power or temperature: NVML: %s: %s", device, uuid, error
        )
        return None


def _opened(device: str, level: int) -> Any:
    """Return the module of NVML, opened; None, logged at this level, if it cannot be."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        logger.log(level, "%s: no utilization, power or temperature: NVML: %s", device, error)
        return None
    return pynvml


class NvmlDevice:
    """Reads one GPU without using CUDA streams. Readings that it does not support are absent.

    Attributes:
        device: The name of the device, such as "cuda:0".
        uuid: NVML's name of the GPU or of its slice, by which `nvml_device_of` finds it. None if
            NVML does not tell.
    """

    def __init__(self, device: str, nvml: Any, handle: Any, now: Clock = time.monotonic) -> None:
        self.device = device
        self._nvml = nvml
        self._failed: set[str] = set()
        self._is_closed = False
        # `read` must not use samples that `close` has freed.
        self._lock = threading.Lock()
        self._cleanup = ExitStack()
        self._cleanup.callback(nvml.nvmlShutdown)
        self._sources = _supported(device, nvml, _makers(nvml, handle, self._cleanup))
        self._identity = identity(nvml, handle)
        self.uuid = next((key[1] for key in self._identity), None)
        self._is_lost = False
        self._health = _supported(device, nvml, health_sources(nvml, handle, now))
        events = _supported(
            device, nvml, {"XID events": lambda: XidEvents(nvml, handle, self._cleanup)}
        )
        self._xids = events.get("XID events")

    def read(self) -> Mapping[str, float]:
        """Return the readings. A reading that NVML currently refuses is absent."""
        with self._lock:
            return self._collect(self._sources)

    def health(self) -> HealthReadings:
        """Return the readings of the GPU's health.

        While NVML reports the GPU as lost, only its identity, its XID errors and ("lost",) remain.
        """
        with self._lock:
            if self._is_closed:
                return {}
            readings = {**self._identity, **self._xid_errors()}
            if not self._is_lost or not self._sources:
                readings |= self._collect(self._health)
            return {**readings, ("lost",): float(self._is_lost)}

    def close(self) -> None:
        """Shut NVML down. Later readings are empty."""
        with self._lock:
            self._is_closed = True
            self._sources = {}
            self._cleanup.close()  # does nothing the second time

    def _collect(
        self, sources: Mapping[str, Callable[[], Mapping[Key, float]]]
    ) -> dict[Key, float]:
        """Return all readings of `sources`, and note whether the GPU is lost."""
        readings: dict[Key, float] = {}
        for name, source in sources.items():
            try:
                readings.update(source())
            except self._nvml.NVMLError as error:
                if error.value in _LOST:
                    self._set_lost(error)
                    return {}
                self._log_once(name, error)
        if readings:
            self._is_lost = False
        return readings

    def _set_lost(self, error: object) -> None:
        if not self._is_lost:
            logger.error("%s: NVML no longer reaches the GPU: %s", self.device, error)
        self._is_lost = True

    def _xid_errors(self) -> HealthReadings:
        if self._xids is None:
            return {}
        numbers = self._xids.poll()
        if numbers:  # the fault may have changed the counters, and soon ends the process
            for source in self._health.values():
                if isinstance(source, Seldom):
                    source.expire()
        for number in numbers:
            drains = number in BY_NUMBER and BY_NUMBER[number].drain
            level = logging.ERROR if drains else logging.WARNING
            logger.log(level, "%s: XID %d: %s", self.device, number, describe(number))
        return {("xid_errors", str(xid)): float(n) for xid, n in self._xids.counts.items()}

    def _log_once(self, name: str, error: object) -> None:
        if name not in self._failed:
            self._failed.add(name)
            logger.warning("%s: NVML fails to read %s: %s", self.device, name, error)


def _find_handle(
    nvml: Any, device_index: int, *, uuid: str | None, variable: str | None, is_slice: bool = False
) -> Any:
    """Return NVML's handle of a CUDA device, or None if there is none.

    Args:
        nvml: The module pynvml, initialized.
        device_index: torch's index.
        uuid: The device's UUID by CUDA, without a prefix, if CUDA is available. It takes
            precedence: it does not depend on the order in which CUDA numbers devices.
        variable: The value of CUDA_VISIBLE_DEVICES; None if unset. Its numbers are read as
            NVML's, which is right under CUDA_DEVICE_ORDER=PCI_BUS_ID and on machines whose GPUs
            are all alike.
        is_slice: Whether the device is a MIG slice. The handle of its GPU is not returned then,
            because its readings contain those of the other slices.
    """
    prefixes = ("MIG-",) if is_slice else ("GPU-", "MIG-")
    for name in () if uuid is None else [prefix + uuid for prefix in prefixes]:
        try:
            return _handle_of(nvml, name)
        except nvml.NVMLError:
            continue
    entry = _visible_entry(variable, device_index)
    if entry is None or (is_slice and not str(entry).startswith("MIG-")):
        return None
    try:
        if isinstance(entry, int):
            return nvml.nvmlDeviceGetHandleByIndex(entry)
        return _handle_by_uuid(nvml, entry)
    except nvml.NVMLError:
        return None


def _visible_entry(variable: str | None, device_index: int) -> int | str | None:
    """Return the index or UUID at a position of CUDA_VISIBLE_DEVICES, by CUDA's rules.

    The list ends before the first entry of a different kind than entry 0. If an entry is repeated,
    the list is empty.
    """
    if variable is None:
        return device_index
    entries: list[int | str] = []
    prefix = next((kind for kind in ("GPU-", "MIG-") if variable.strip().startswith(kind)), None)
    for word in (word.strip() for word in variable.split(",")):
        ordinal = _ORDINAL.match(word)
        if prefix is not None and word.startswith(prefix):
            entries.append(word)
        elif prefix is None and ordinal:
            entries.append(int(ordinal[0]))
        else:
            break
    if len(set(entries)) < len(entries) or device_index >= len(entries):
        return None
    return entries[device_index]


def _handle_by_uuid(nvml: Any, uuid: str) -> Any:
    """Find a device by UUID. The UUID of a whole GPU may be abbreviated if it is unambiguous."""
    if uuid.startswith("MIG-"):
        return _handle_of(nvml, uuid)
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    found = [each for each in handles if text_of(nvml.nvmlDeviceGetUUID(each)).startswith(uuid)]
    return found[0] if len(found) == 1 else None


def _handle_of(nvml: Any, uuid: str) -> Any:
    """Return NVML's handle of the device with exactly this UUID."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except TypeError:  # pynvml before 11.5, another distribution of the same module
        return nvml.nvmlDeviceGetHandleByUUID(uuid.encode())


def _supported(device: str, nvml: Any, makers: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Return what the functions make, without those that the device does not support.

    A function or a constant that the module lacks counts as not supported, too.
    """
    made: dict[str, T] = {}
    for name, make in makers.items():
        try:
            made[name] = make()
        except (nvml.NVMLError, AttributeError):
            continue
    if missing := [name for name in makers if name not in made]:
        logger.info("%s: NVML does not offer %s", device, ", ".join(missing))
    return made


def _makers(nvml: Any, handle: Any, cleanup: ExitStack) -> Mapping[str, Callable[[], Source]]:
    """Return a function for each reading, which makes its source."""
    return {
        **{
            name: partial(_gauge, name, partial(ask, nvml, handle)) for name, ask in _GAUGES.items()
        },
        "sm_active_ratio": partial(_sm_active, nvml, handle, cleanup),
        "energy": partial(_energy, nvml, handle),
        "link bytes": partial(_link_bytes, nvml, handle),
    }


# Each function below reads the device once, and raises NVMLError if the device does not support
# the reading. It returns a source, which makes all later readings.


def _gauge(name: str, ask: Callable[[], float]) -> Source:
    """Return the source of a current value."""
    ask()
    return lambda: {name: ask()}


def _energy(nvml: Any, handle: Any) -> Source:
    """Return the source of the joules used from now on. The driver counts from its own start."""

    def ask() -> float:
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000

    total = RunningTotal(ask())
    return lambda: {"energy_joules": total.update(ask())}


def _link_bytes(nvml: Any, handle: Any) -> Source:
    """Return the source of the bytes sent over NVLink and PCIe from now on, if counted."""
    # An older nvidia-ml-py lacks the newer fields.
    known = [field for field in _LINK_FIELDS if hasattr(nvml, field[1])]
    first = _link_counters(nvml, handle, known)
    if not first:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    fields = [field for field in known if field[0] in first]
    totals = {name: RunningTotal(value) for name, value in first.items()}

    def read() -> Mapping[str, float]:
        counters = _link_counters(nvml, handle, fields)
        return {name: totals[name].update(value) for name, value in counters.items()}

    return read


def _link_counters(
    nvml: Any, handle: Any, fields: list[tuple[str, str, int, int]]
) -> dict[str, float]:
    wanted = [(getattr(nvml, constant), scope) for _, constant, scope, _ in fields]
    answers = nvml.nvmlDeviceGetFieldValues(handle, wanted)
    return {
        name: number_of(answer) * unit_bytes
        for (name, _, _, unit_bytes), answer in zip(fields, answers, strict=True)
        if answer.nvmlReturn == nvml.NVML_SUCCESS
        and answer.valueType != nvml.NVML_VALUE_TYPE_UNSIGNED_INT
    }


def _sm_active(nvml: Any, handle: Any, cleanup: ExitStack) -> Source:
    """Return the source of the ratio of time in which multiprocessors were active.

    GPM provides this ratio on Hopper and later GPUs. Access may be restricted to administrators.

    Args:
        nvml: The module pynvml, initialized.
        handle: The device.
        cleanup: Frees GPM's samples when it closes.
    """
    if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    older, newer = _gpm_sample(nvml, cleanup), _gpm_sample(nvml, cleanup)
    question = nvml.c_nvmlGpmMetricsGet_t()
    question.version = nvml.NVML_GPM_METRICS_GET_VERSION
    question.numMetrics = 1
    question.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
    nvml.nvmlGpmSampleGet(handle, newer)

    def read() -> Mapping[str, float]:
        nonlocal older, newer
        nvml.nvmlGpmSampleGet(handle, older)
        older, newer = newer, older
        question.sample1, question.sample2 = older, newer
        answer = nvml.nvmlGpmMetricsGet(question).metrics[0]
        if answer.nvmlReturn != nvml.NVML_SUCCESS or not math.isfinite(answer.value):
            return {}
        return {"sm_active_ratio": answer.value / 100}

    return read


def _gpm_sample(nvml: Any, cleanup: ExitStack) -> Any:
    sample = nvml.nvmlGpmSampleAlloc()
    cleanup.callback(nvml.nvmlGpmSampleFree, sample)
    return sample
