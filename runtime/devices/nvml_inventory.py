"""Lists the driver and the GPUs of this host by NVML, for checks before a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU. A figure is None if the driver does not offer it.

    Attributes:
        total_bytes: Memory of the device.
        used_bytes: Memory in use, by all processes.
        processes: Ids of the processes that compute on it.
        memory_bytes_per_second: Peak rate of its memory, from bus width and largest clock.
        pcie: Generation and number of lanes in use.
        pcie_best: Generation and number of lanes that device and slot support.
        error: Number and text of NVML's error if it refuses access to the GPU or to the figures of
            its memory; None without an error.
    """

    name: str
    uuid: str
    total_bytes: int | None
    used_bytes: int | None
    processes: tuple[int, ...]
    memory_bytes_per_second: float | None
    pcie: tuple[int, int] | None
    pcie_best: tuple[int, int] | None
    error: tuple[int, str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlInventory:
    """The driver and its GPUs.

    Attributes:
        cuda_version: Highest version of CUDA that the driver supports, such as (13, 0); None if
            unknown.
    """

    driver: str
    cuda_version: tuple[int, int] | None
    devices: tuple[GpuFacts, ...]


def nvml_inventory() -> NvmlInventory | None:
    """Return the GPUs of this host, also those that CUDA_VISIBLE_DEVICES hides; None without NVML.

    NVML is not initialized afterwards, unless it was before.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        logger.debug("NVML: %s", error)
        return None
    try:
        cuda = _ask(pynvml, pynvml.nvmlSystemGetCudaDriverVersion_v2)
        count = _ask(pynvml, pynvml.nvmlDeviceGetCount) or 0
        return NvmlInventory(
            driver=_text(_ask(pynvml, pynvml.nvmlSystemGetDriverVersion)),
            cuda_version=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
            devices=tuple(_facts(pynvml, index) for index in range(count)),
        )
    finally:
        pynvml.nvmlShutdown()


def _facts(nvml: Any, index: int) -> GpuFacts:
    gpu = memory = error = None
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
    except nvml.NVMLError as refusal:
        error = (int(refusal.value), str(refusal))
    return GpuFacts(
        name=_text(_ask(nvml, nvml.nvmlDeviceGetName, gpu)),
        uuid=_text(_ask(nvml, nvml.nvmlDeviceGetUUID, gpu)),
        total_bytes=None if memory is None else int(memory.total),
        used_bytes=None if memory is None else int(memory.used),
        processes=tuple(
            each.pid for each in _ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, gpu) or ()
        ),
        memory_bytes_per_second=_memory_rate(nvml, gpu),
        pcie=_pcie(
            nvml, gpu, nvml.nvmlDeviceGetCurrPcieLinkGeneration, nvml.nvmlDeviceGetCurrPcieLinkWidth
        ),
        pcie_best=_pcie(
            nvml, gpu, nvml.nvmlDeviceGetMaxPcieLinkGeneration, nvml.nvmlDeviceGetMaxPcieLinkWidth
        ),
        error=error,
    )


def _memory_rate(nvml: Any, gpu: Any) -> float | None:
    """Return bus width times clock times 2: GPU memory transfers twice per cycle of that clock."""
    # pynvml before 11.5, another distribution of the same module, lacks it.
    width_bits = _ask(nvml, getattr(nvml, "nvmlDeviceGetMemoryBusWidth", None), gpu)
    clock_mhz = _ask(nvml, nvml.nvmlDeviceGetMaxClockInfo, gpu, nvml.NVML_CLOCK_MEM)
    if not width_bits or not clock_mhz:
        return None
    return float(width_bits / 8 * clock_mhz * 1e6 * 2)


def _pcie(
    nvml: Any, gpu: Any, generation: Callable[..., int], width: Callable[..., int]
) -> tuple[int, int] | None:
    found = _ask(nvml, generation, gpu), _ask(nvml, width, gpu)
    return None if None in found else (int(found[0] or 0), int(found[1] or 0))


def _ask(nvml: Any, function: Callable[..., T] | None, *arguments: Any) -> T | None:
    """Return NVML's answer, or None where the device or the driver refuses it.

    The answer is also None if there is no such function, or if an argument is None: NVML has given
    no handle of the device.
    """
    if function is None or None in arguments:
        return None
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _text(answer: str | bytes | None) -> str:
    """Return a text; older releases of nvidia-ml-py return bytes."""
    return answer.decode() if isinstance(answer, bytes) else answer or "unknown"
