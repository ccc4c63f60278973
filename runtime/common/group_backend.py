"""Finds the backends of process groups.

`torch.distributed.get_backend` returns "undefined" if the script named no backend, and the whole
list if it named one for each kind of device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from . import accelerator


def backend_name(group: Any = None) -> str:
    """Return the backend for the accelerator's tensors, or else the backend for CPU tensors.

    Args:
        group: The process group; None for the world group.
    """
    group = dist.group.WORLD if group is None else group
    device = accelerator.current
    try:
        kind = device.kind if device.is_available() else "cpu"
        name: str = group._get_backend(torch.device(kind)).name()
    except RuntimeError:  # a group for CPU tensors in a job on GPUs
        name = host_backend(group).name()
    return name


def host_backend(group: Any) -> Any:
    """Return the backend object for CPU tensors.

    Raises:
        RuntimeError: The group has none.
    """
    return group._get_backend(torch.device("cpu"))
