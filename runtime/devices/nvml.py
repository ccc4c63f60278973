"""An NVIDIA GPU through NVML."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from .nvml_sources import Source, energy, gauge, link_bytes, sm_active
from .visible import find_handle

logger = logging.getLogger(__name__)

_GAUGES: Mapping[str, Callable[[Any, Any], float]] = {
    "utilization_ratio": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "power_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "temperature_celsius": lambda nvml, gpu: float(
        nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
    ),
    "clock_hertz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM) * 1e6,
}


class NvmlDevice:
    """Reads one GPU; what it does not support is absent. NVML does not touch CUDA's streams."""

    def __init__(self, device: str, nvml: Any, handle: Any) -> None:
        self.device = device
        self._nvml = nvml
        self._failed: set[str] = set()
        # A reading must not meet samples that close has freed.
        self._lock = threading.Lock()
        self._cleanup = ExitStack()
        self._cleanup.callback(nvml.nvmlShutdown)
        self._sources = _supported_sources(device, nvml, handle, self._cleanup)

    def read(self) -> Mapping[str, float]:
        """Return the readings; those that NVML refuses this time are absent."""
        readings: dict[str, float] = {}
        with self._lock:
            for name, source in self._sources.items():
                try:
                    readings.update(source())
                except self._nvml.NVMLError as error:
                    self._log_once(name, error)
        return readings

    def close(self) -> None:
        """Let go of NVML; later readings are empty."""
        with self._lock:
            self._sources = {}
            self._cleanup.close()  # a second time there is nothing left to do

    def _log_once(self, name: str, error: object) -> None:
        if name not in self._failed:
            self._failed.add(name)
            logger.warning("%s: NVML fails to read %s: %s", self.device, name, error)


def _supported_sources(
    device: str, nvml: Any, handle: Any, cleanup: ExitStack
) -> dict[str, Source]:
    makers: dict[str, Callable[[], Source]] = {
        name: partial(gauge, name, partial(ask, nvml, handle)) for name, ask in _GAUGES.items()
    }
    makers["sm_active_ratio"] = partial(sm_active, nvml, handle, cleanup)
    makers["energy"] = partial(energy, nvml, handle)
    makers["link bytes"] = partial(link_bytes, nvml, handle)
    sources: dict[str, Source] = {}
    for name, make in makers.items():
        try:
            sources[name] = make()
        except nvml.NVMLError:
            continue
    if missing := [name for name in makers if name not in sources]:
        logger.info("%s: NVML does not offer %s", device, ", ".join(missing))
    return sources


def nvml_device(cuda_device: int) -> NvmlDevice | None:
    """Return the probe of one of torch's CUDA devices, or None if NVML does not reach it."""
    import pynvml

    device = f"cuda:{cuda_device}"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        logger.info("%s: no utilization, power or temperature: NVML: %s", device, error)
        return None
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    handle = find_handle(pynvml, cuda_device, uuid=torch_uuid(cuda_device), variable=variable)
    if handle is None:
        pynvml.nvmlShutdown()
        logger.info(
            "%s: no utilization, power or temperature: NVML has no such device "
            "(CUDA_VISIBLE_DEVICES=%s)",
            device,
            variable,
        )
        return None
    return NvmlDevice(device, pynvml, handle)


def torch_uuid(cuda_device: int) -> str | None:
    """Return what names one of torch's CUDA devices on its host, without a prefix."""
    import torch

    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(cuda_device).uuid)
