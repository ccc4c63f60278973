"""Batches as trees of mappings and sequences: number of samples, slices of rows, transfer.

Tensors and arrays with at least one dimension hold one row per sample. Everything else (numbers,
text, None, tensors without dimensions) belongs to the batch as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ....errors import BatchError

Rows = torch.Tensor | npt.NDArray[Any]


def num_samples(batch: Any) -> int:
    """Return how many samples a batch holds.

    Raises:
        BatchError: The batch has no tensors or no rows, or its leaves differ in length.
    """
    lengths = {name: len(leaf) for name, leaf in _leaves(batch, "")}
    if not lengths:
        raise BatchError(
            f"a batch is a tree of tensors with one row per sample, got {type(batch).__name__} "
            "without any; pass what your DataLoader yields"
        )
    if len(set(lengths.values())) > 1:
        per_leaf = ", ".join(f"{name or 'it'} has {length}" for name, length in lengths.items())
        raise BatchError(f"the leaves of a batch must have one row per sample, but {per_leaf}")
    (length,) = set(lengths.values())
    if length == 0:
        raise BatchError(
            "this rank's local batch is empty; every rank needs at least one sample. "
            "Drop the last, incomplete batch of an epoch (drop_last=True)"
        )
    return length


def max_length(batch: Any) -> int:
    """Return the largest second dimension, which is the padded length if the batch has token ids.

    Returns 1 if no leaf has two dimensions.
    """
    return max(
        (int(leaf.shape[1]) for _, leaf in _leaves(batch, "") if len(leaf.shape) > 1), default=1
    )


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """Return rows `start` to `stop` of every leaf, as views, in the same tree."""
    return _mapped(batch, lambda leaf: leaf[start:stop])


def on_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on a device; arrays become tensors."""
    return _mapped(
        batch, lambda leaf: torch.as_tensor(leaf).to(device, non_blocking=True), constants=True
    )


def _is_rows(node: Any, *, constants: bool = False) -> bool:
    return isinstance(node, torch.Tensor | np.ndarray) and (constants or len(node.shape) > 0)


def _leaves(node: Any, name: str) -> Iterator[tuple[str, Rows]]:
    if _is_rows(node):
        yield name, node
    elif isinstance(node, Mapping):
        for key, child in node.items():
            yield from _leaves(child, f"{name}.{key}" if name else str(key))
    elif _is_sequence(node):
        for index, child in enumerate(node):
            yield from _leaves(child, f"{name}[{index}]")


def _mapped(node: Any, change: Callable[[Any], Any], *, constants: bool = False) -> Any:
    if _is_rows(node, constants=constants):
        return change(node)
    if isinstance(node, Mapping):
        return {key: _mapped(child, change, constants=constants) for key, child in node.items()}
    if _is_sequence(node):
        children = [_mapped(child, change, constants=constants) for child in node]
        is_named = hasattr(node, "_fields")
        return type(node)(*children) if is_named else type(node)(children)
    return node


def _is_sequence(node: Any) -> bool:
    return isinstance(node, Sequence) and not isinstance(node, (str, bytes))
