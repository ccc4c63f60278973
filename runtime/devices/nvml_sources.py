"""The readings of one NVML device.

Each function here looks at the device once, so that it raises NVMLError if the device does not
support the reading, and returns the source that reads it from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

Source = Callable[[], Mapping[str, float]]

_ALL_LINKS = 0xFFFFFFFF  # nvml.h: scopeId UINT_MAX sums over all links
# Reading, NVML's field, scope, bytes per unit. All are totals; nvmlDeviceGetPcieThroughput is left
# out, since it is a rate over 20 ms and blocks for as long.
_LINK_FIELDS = (
    ("nvlink_sent_bytes", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", _ALL_LINKS, 1024),
    ("nvlink_received_bytes", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", _ALL_LINKS, 1024),
    ("pcie_sent_bytes", "NVML_FI_DEV_PCIE_COUNT_TX_BYTES", 0, 1),
    ("pcie_received_bytes", "NVML_FI_DEV_PCIE_COUNT_RX_BYTES", 0, 1),
)


class RunningTotal:
    """What one of the driver's counters has grown by since the first look.

    Where the counter wraps around, what it reached between the last look and the wrap is lost;
    guessing its width could instead invent bytes.
    """

    def __init__(self, first: float) -> None:
        self._last = first
        self._total = 0.0

    def update(self, now: float) -> float:
        """Take the counter's value of this moment and return the growth since the first."""
        self._total += now - self._last if now >= self._last else now
        self._last = now
        return self._total


def gauge(name: str, ask: Callable[[], float]) -> Source:
    """Read a value of the moment."""
    ask()
    return lambda: {name: ask()}


def energy(nvml: Any, handle: Any) -> Source:
    """Read the joules used from now on; the driver counts millijoules since it was loaded."""

    def ask() -> float:
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000

    total = RunningTotal(ask())
    return lambda: {"energy_joules": total.update(ask())}


def link_bytes(nvml: Any, handle: Any) -> Source:
    """Read the bytes over NVLink and PCIe from now on, those of them that the device counts."""
    # An older nvidia-ml-py does not know the newer fields.
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
        name: float(_whole_number(nvml, answer) * unit_bytes)
        for (name, _, _, unit_bytes), answer in zip(fields, answers, strict=True)
        if answer.nvmlReturn == nvml.NVML_SUCCESS
    }


def _whole_number(nvml: Any, answer: Any) -> int:
    """Take the member of the union that the answer names."""
    if answer.valueType == nvml.NVML_VALUE_TYPE_UNSIGNED_INT:
        return int(answer.value.uiVal)
    return int(answer.value.ullVal)


def sm_active(nvml: Any, handle: Any, cleanup: ExitStack) -> Source:
    """Read the share of time that multiprocessors were active since the reading before.

    GPM has this from Hopper on, and may reserve it to administrators.

    Args:
        nvml: The module pynvml, initialised.
        handle: The device.
        cleanup: Is given what frees GPM's samples.
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
