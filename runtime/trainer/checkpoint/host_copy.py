"""Copies a state dict to host memory, so that it can be written while training changes the state.

The copy shares storages, views and objects as the original does, so both give the same file.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def host_copy(state: T) -> T:
    """Return a deep copy of a tree, with its tensors in host memory, and without gradients.

    Args:
        state: Dicts, lists and tuples of tensors and of any objects that can be copied.

    Raises:
        MemoryError: There is not enough host memory.
        RuntimeError: There is not enough host memory (torch's allocator), or an object cannot be
            copied.
    """
    memo: dict[int, Any] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    kept = list(_plain_tensors(state))  # ids are unique only while the objects live
    for tensor in kept:
        memo[id(tensor)] = _copied(tensor, storages)
    for tensor in kept:  # torch writes the attributes, such as DeepSpeed's `ds_id`, to the file
        if vars(tensor):
            vars(memo[id(tensor)]).update(copy.deepcopy(vars(tensor), memo))
    return copy.deepcopy(state, memo)


def host_copy_bytes(state: Any) -> int:
    """Return the bytes of the tensors' storages in a tree, each storage counted once."""
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in _plain_tensors(state)
    }
    return sum(storages.values())


def _plain_tensors(node: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors without a class of their own; deepcopy copies all others."""
    if type(node) in (torch.Tensor, torch.nn.Parameter):
        if node.layout is torch.strided and not node.is_quantized:
            yield node
    elif isinstance(node, Mapping):
        for child in node.values():
            yield from _plain_tensors(child)
    elif isinstance(node, list | tuple):
        for child in node:
            yield from _plain_tensors(child)


def _copied(
    tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]
) -> torch.Tensor | torch.nn.Parameter:
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        is_on_host = storage.device.type == "cpu"
        storages[storage._cdata] = storage.clone() if is_on_host else storage.cpu()
    copied = torch.empty(0, dtype=tensor.dtype, device="cpu")
    with torch.no_grad():
        copied.set_(
            storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride()
        )
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)
