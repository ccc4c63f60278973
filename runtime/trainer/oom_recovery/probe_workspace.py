"""Finds out before a collective is issued whether it will get the memory it works with.

gloo allocates within its calls: a copy of the input to reduce and scatter, the flat output of a
gather, segments of a ring. Where that fails it is too late: the other ranks are in the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

_COPIES = 2  # a copy of the tensor itself, and the segments of gloo's ring beside it


def probe_workspace(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Allocate what a call on these tensors may need, and let go of it at once.

    On devices nothing is done: NCCL has its buffers since its first call.

    Raises:
        RuntimeError: The memory is not there; the same error as the call's own would be.
    """
    on_host = [each for each in _tensors((*args, *kwargs.values())) if each.device.type == "cpu"]
    if on_host:
        torch.empty(_COPIES * sum(each.nbytes for each in on_host), dtype=torch.uint8, device="cpu")


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_sparse:
                yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
