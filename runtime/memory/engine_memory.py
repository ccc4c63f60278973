"""What an engine holds at this moment, in bytes by device and category.

Read on the training thread between two phases: nothing is computed, copied, gathered or waited for,
and no tensor is kept. A storage counts once and in full, however many tensors look into it. On CPU
a buffer counts as far as its pages were ever written (`touched.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from ..devices.memory.resident_bytes import resident_bytes
from .categories import COMM_BUFFERS, HELD, Held
from .engine_tensors import engine_tensors

_CPU = torch.device("cpu")


def bytes_by_category(engine: Any) -> Held:
    """Return bytes by device ("cpu", "cuda:0") and category, of every device that holds anything.

    Args:
        engine: A DeepSpeed engine of any ZeRO stage, with or without an optimizer.
    """
    seen: set[int] = set()
    holdings: dict[str, dict[str, int]] = {}
    for _, category, found in engine_tensors(engine):
        for device, size in _new_bytes(found, seen, as_buffers=category == COMM_BUFFERS).items():
            by_category = holdings.setdefault(str(device), dict.fromkeys(HELD, 0))
            by_category[category] += size
    return holdings


def _new_bytes(found: list[Any], seen: set[int], *, as_buffers: bool) -> dict[torch.device, int]:
    """Sum up the storages at addresses that were not `seen` yet; they are from then on."""
    sums: dict[torch.device, int] = {}
    for tensor in found:
        if not isinstance(tensor, torch.Tensor):  # a count of steps, say
            continue
        try:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
        except (NotImplementedError, RuntimeError):
            # A sparse gradient has storages of its own, a tensor without data has none.
            parts = _new_bytes(_sparse_parts(tensor), seen, as_buffers=as_buffers)
            for device, size in parts.items():
                sums[device] = sums.get(device, 0) + size
            continue
        if address == 0 or address in seen:  # 0: partitioned away, or on the meta device
            continue
        seen.add(address)
        device, size = tensor.device, storage.nbytes()
        if as_buffers and device == _CPU:
            size = resident_bytes(address, size)
        sums[device] = sums.get(device, 0) + size
    return sums


def _sparse_parts(tensor: torch.Tensor) -> list[Any]:
    return [tensor._indices(), tensor._values()] if tensor.layout == torch.sparse_coo else []
