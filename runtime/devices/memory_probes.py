"""Defines the protocol of memory probes, and chooses this machine's probes by kind of device.

A memory probe reads bytes from a device's allocator or from the kernel. `runtime/memory/`
computes what the bytes are used for.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import psutil

from .cuda_allocator import device_memory

logger = logging.getLogger(__name__)


class MemoryProbe(Protocol):
    """Reads the bytes of one device's memory, by state.

    Attributes:
        device: The name of the device, such as "cuda:0" or "cpu".
        own_peaks: Whether a peak covers only the time since the last reading, so that it belongs to
            the steps since then.
    """

    device: str

    @property
    def own_peaks(self) -> bool:
        """Whether a peak covers only the time since the last reading."""

    def read(self) -> Mapping[str, float]:
        """Return bytes by memory state, and `alloc_retries` if the device counts them.

        Unknown values are absent.
        """

    def close(self) -> None:
        """Restore wrapped functions. Safe to call twice."""


def memory_probes(*, device_index: int | None, reset_peak: bool) -> list[MemoryProbe]:
    """Return the probes of this rank: the host's, and its accelerator's if it has one.

    Args:
        device_index: torch's index of the accelerator this rank trains on; None on CPU.
        reset_peak: Whether peaks may be reset at each reading: the kernel's mark of peak RSS, and
            the allocator's. The training script does not see the allocator's resets
            until the probe is closed.
    """
    probes: list[MemoryProbe] = [_host_probe(reset_peak)]
    if device_index is not None:
        probes.append(device_memory(device_index, reset_peak=reset_peak))
    return probes


def _host_probe(reset_peak: bool) -> MemoryProbe:
    if Path("/proc/self/status").exists():
        from .host_memory import HostMemory  # needs the module `resource`, which Windows lacks

        return HostMemory(reset_peak=reset_peak)
    return PortableMemory()


class PortableMemory:
    """Reads the RSS of this process by psutil, on systems without /proc."""

    device = "cpu"
    own_peaks = False

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._failed = False

    def read(self) -> Mapping[str, float]:
        """Return the state allocated, in bytes; empty if the process cannot be read."""
        try:
            return {"allocated": float(self._process.memory_info().rss)}
        except psutil.Error as error:
            if not self._failed:
                self._failed = True
                logger.info("the memory of this process cannot be read: %s", error)
            return {}

    def close(self) -> None:
        """Do nothing, as nothing was wrapped."""
