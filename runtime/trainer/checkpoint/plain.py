"""What may be saved: numbers, text, tensors and arrays, in dicts, lists and tuples. No objects.

A saved object would have to be unpickled, which runs code and breaks with the code's next version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ....errors import CheckpointError

_LEAVES = (type(None), bool, int, float, str, bytes)
_ARRAY = "zerowatch.array"  # the key under which an array stands as a tensor
_NUMERIC = "biuf"


def to_serializable(node: Any, place: str) -> Any:
    """Return a copy, on the host, that `torch.load(weights_only=True)` reads back.

    Args:
        node: A tree.
        place: What it is called, for the error.

    Raises:
        CheckpointError: Something in it is an object of its own kind.
    """
    if isinstance(node, torch.Tensor):
        return node.detach().cpu().clone()  # of a view the whole storage would be written
    if isinstance(node, np.generic):
        return to_serializable(node.item(), place)
    if isinstance(node, np.ndarray) and node.dtype.kind in _NUMERIC:
        return {_ARRAY: torch.from_numpy(np.ascontiguousarray(node).reshape(node.shape).copy())}
    if isinstance(node, Mapping):
        return {
            _key(key, place): to_serializable(child, f"{place}.{key}")
            for key, child in node.items()
        }
    if type(node) in (list, tuple, torch.Size):
        kind = list if isinstance(node, list) else tuple
        return kind(to_serializable(child, f"{place}[{index}]") for index, child in enumerate(node))
    if type(node) in _LEAVES:
        return node
    raise CheckpointError(_refusal(place, node))


def from_serializable(node: Any) -> Any:
    """Return the tree as it was given, arrays as arrays."""
    if isinstance(node, dict):
        if node.keys() == {_ARRAY}:
            return node[_ARRAY].numpy()
        return {key: from_serializable(child) for key, child in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(from_serializable(child) for child in node)
    return node


def _key(key: Any, place: str) -> Any:
    if type(key) not in _LEAVES:
        raise CheckpointError(_refusal(f"a key of {place}", key))
    return key


def _refusal(place: str, node: Any) -> str:
    return (
        f"{place} is of type {type(node).__module__}.{type(node).__qualname__}, which is not "
        "saved: only numbers, text, tensors and arrays, in dicts, lists and tuples. Save what it "
        "is made of, for example its state_dict()"
    )
