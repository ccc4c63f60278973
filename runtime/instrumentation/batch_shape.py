"""How many samples and tokens a batch holds, read from its tensors' shapes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

TOKEN_NAMES = frozenset({"input_ids", "tokens", "token_ids", "decoder_input_ids"})


@dataclass(slots=True)
class BatchShape:
    """A batch's size; `tokens` counts padding too, and all are None where the batch shows none.

    `elements` are those of the tensor that told the number of samples.
    """

    samples: int | None = None
    elements: int | None = None
    tokens: int | None = None
    sequence_length: int | None = None


UNKNOWN = BatchShape()


def batch_shape(args: Sequence[Any], kwargs: Mapping[str, Any]) -> BatchShape:
    """Read the arguments of a forward call, and one level of mappings and sequences in them.

    The first tensor with a dimension gives the samples. Tokens come from a tensor of shape
    (samples, length) that is called as token ids usually are, else from the first of an integer
    type. Runs in every forward: no generators, no abstract base classes.
    """
    shape = BatchShape()
    if kwargs:
        _look(kwargs.items(), shape)
    for value in args:
        if shape.tokens is not None:
            break
        if isinstance(value, torch.Tensor):
            _look((("", value),), shape)
        elif isinstance(value, list | tuple):
            _look([("", inner) for inner in value], shape)
        elif hasattr(value, "items"):
            _look(value.items(), shape)
    return shape


def _look(named: Any, shape: BatchShape) -> None:
    """Take what tensors tell; one called as token ids are overrules what was guessed before."""
    for name, value in named:
        if not isinstance(value, torch.Tensor):
            if isinstance(value, dict):
                _look(value.items(), shape)
            continue
        size = value.shape
        if not size:
            continue
        if shape.samples is None:
            shape.samples, shape.elements = size[0], value.numel()
        if len(size) != 2:
            continue
        is_named = name in TOKEN_NAMES
        if is_named or (shape.tokens is None and _holds_whole_numbers(value)):
            shape.samples, shape.sequence_length = size
            shape.tokens = size[0] * size[1]
        if is_named:
            return


def _holds_whole_numbers(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.dtype == torch.bool)
