"""Which memory is read on this machine."""

from __future__ import annotations

from pathlib import Path

from .cuda import cuda_memory
from .probe import MemoryProbe


def memory_probes(*, cuda_device: int | None, reset_peak: bool) -> list[MemoryProbe]:
    """Return the probes of this rank: the host's, and its GPU's if it has one.

    Args:
        cuda_device: torch's index of the GPU this rank trains on; None on CPU.
        reset_peak: Whether peaks may be reset at each reading: the kernel's mark of peak RSS, and
            the allocator's, which the training script does not notice until the probe is closed.
    """
    host = _host_probe(reset_peak)
    return (
        [host] if cuda_device is None else [host, cuda_memory(cuda_device, reset_peak=reset_peak)]
    )


def _host_probe(reset_peak: bool) -> MemoryProbe:
    if Path("/proc/self/status").exists():
        from .host import HostMemory  # needs the module `resource`, which Windows has not

        return HostMemory(reset_peak=reset_peak)
    from .portable import PortableMemory

    return PortableMemory()
