"""Which devices are read on this machine, and how much they could compute."""

from __future__ import annotations

from .cpu import CpuDevice
from .nvml import nvml_device, torch_uuid
from .peak import gpu_peak_flops_per_second, measure_cpu_flops_per_second
from .probe import DeviceProbe


def device_probes(*, cuda_device: int | None) -> list[DeviceProbe]:
    """Return the probe of this rank's device; none if its GPU cannot be read.

    Args:
        cuda_device: torch's index of the GPU this rank trains on; None on CPU.
    """
    if cuda_device is None:
        return [CpuDevice()]
    probe = nvml_device(cuda_device)
    return [] if probe is None else [probe]


def peak_flops_per_second(*, cuda_device: int | None) -> float | None:
    """Return the peak of this rank's device in FLOP/s, or None if it is not known.

    A GPU is looked up in a table. A CPU is measured, which takes about 40 ms: call it before
    training starts.

    Args:
        cuda_device: torch's index of the GPU this rank trains on; None on CPU.
    """
    if cuda_device is None:
        return measure_cpu_flops_per_second()
    import torch

    return gpu_peak_flops_per_second(torch.cuda.get_device_name(cuda_device))


def hardware_ids(*, cuda_device: int | None) -> dict[str, str]:
    """Return what names this rank's GPU on its host, by device; nothing on CPU.

    Args:
        cuda_device: torch's index of the GPU this rank trains on; None on CPU.
    """
    uuid = None if cuda_device is None else torch_uuid(cuda_device)
    return {} if uuid is None else {f"cuda:{cuda_device}": f"GPU-{uuid}"}
