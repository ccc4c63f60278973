"""How many samples and tokens a batch holds, read from its tensors' shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

TOKEN_NAMES = frozenset({"input_ids", "tokens", "token_ids", "decoder_input_ids"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """A batch's size; `tokens` counts padding too, and both are None where the batch shows none."""

    samples: int | None
    tokens: int | None
    sequence_length: int | None


UNKNOWN = BatchShape(samples=None, tokens=None, sequence_length=None)


def batch_shape(args: Iterable[Any], kwargs: Mapping[str, Any]) -> BatchShape:
    """Read the arguments of a forward call.

    The first tensor with a dimension gives the samples. Tokens come from a tensor of shape
    (samples, length) that is called as token ids usually are, else from the first of an integer
    type.
    """
    first: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    for name, tensor in _tensors(args, kwargs):
        if first is None:
            first = tensor
        if tensor.dim() != 2:
            continue
        if name in TOKEN_NAMES:
            tokens = tensor
            break
        if tokens is None and not (tensor.is_floating_point() or tensor.dtype == torch.bool):
            tokens = tensor
    if first is None:
        return UNKNOWN
    return BatchShape(
        samples=(first if tokens is None else tokens).shape[0],
        tokens=None if tokens is None else tokens.numel(),
        sequence_length=None if tokens is None else tokens.shape[1],
    )


def _tensors(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Walk the top level and one level of mappings and sequences below it."""
    for name, value in (*(("", value) for value in args), *kwargs.items()):
        if isinstance(value, torch.Tensor):
            if value.dim():
                yield name, value
        elif isinstance(value, Mapping):
            yield from ((k, v) for k, v in value.items() if _has_rows(v))
        elif isinstance(value, list | tuple):
            yield from ((name, v) for v in value if _has_rows(v))


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0
