"""Which of NVML's devices is torch's cuda:N; CUDA_VISIBLE_DEVICES renumbers what CUDA shows."""

from __future__ import annotations

import re
from typing import Any

_ORDINAL = re.compile(r"\d+")


def find_handle(nvml: Any, cuda_device: int, *, uuid: str | None, variable: str | None) -> Any:
    """Return NVML's handle of a CUDA device, or None if there is no such device.

    Args:
        nvml: The module pynvml, initialised.
        cuda_device: torch's index.
        uuid: The device's UUID by CUDA's account, without a prefix, if CUDA can be asked. It
            decides, since it does not depend on the order in which CUDA numbers devices.
        variable: The value of CUDA_VISIBLE_DEVICES; None if unset. Its numbers are taken for
            NVML's, which is right under CUDA_DEVICE_ORDER=PCI_BUS_ID and on machines whose GPUs
            are all alike.
    """
    for name in () if uuid is None else (f"GPU-{uuid}", f"MIG-{uuid}"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(name)
        except nvml.NVMLError:
            continue
    entry = visible_entry(variable, cuda_device)
    if entry is None:
        return None
    try:
        if isinstance(entry, int):
            return nvml.nvmlDeviceGetHandleByIndex(entry)
        return _handle_by_uuid(nvml, entry)
    except nvml.NVMLError:
        return None


def visible_entry(variable: str | None, cuda_device: int) -> int | str | None:
    """Return the index or UUID at a place of CUDA_VISIBLE_DEVICES, by CUDA's own rules.

    The list ends before the first entry that is not of the first one's kind; a repeated entry
    makes it empty.
    """
    if variable is None:
        return cuda_device
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
    if len(set(entries)) < len(entries) or cuda_device >= len(entries):
        return None
    return entries[cuda_device]


def _handle_by_uuid(nvml: Any, uuid: str) -> Any:
    """Look a UUID up; that of a whole GPU may be cut short, as long as it fits only one."""
    if uuid.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    fitting = [handle for handle in handles if nvml.nvmlDeviceGetUUID(handle).startswith(uuid)]
    return fitting[0] if len(fitting) == 1 else None
