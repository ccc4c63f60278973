"""Reads the number of samples and tokens of a batch from the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..common.hot_path import ShapeReader

# Names of tensors that hold token ids, in Hugging Face's and Megatron's batches.
TOKEN_NAMES = frozenset({"input_ids", "tokens", "token_ids", "decoder_input_ids"})


@dataclass(slots=True)
class BatchShape:
    """The size of a batch. A field is None if no tensor contains the information.

    Attributes:
        samples: Number of samples, the first dimension.
        elements: Elements of the tensor from which the samples were read.
        tokens: Number of tokens, padding included.
        sequence_length: Number of tokens of each sample, padding included. None for nested tensors,
            whose samples differ in length.
    """

    samples: int | None = None
    elements: int | None = None
    tokens: int | None = None
    sequence_length: int | None = None


UNKNOWN = BatchShape()


def shape_in_python(args: Sequence[Any], kwargs: Mapping[str, Any]) -> BatchShape:
    """Return the size of a batch, read from the arguments of a forward call.

    The arguments are searched, and one level of mappings and sequences in them. The first tensor
    with at least one dimension determines the samples. A tensor of shape [samples, length]
    determines the tokens: one with a name in TOKEN_NAMES, else the first of an integer type. The
    code avoids generators and abstract base classes, because it runs in every forward pass.
    """
    shape = BatchShape()
    if kwargs:
        _read_tensors(kwargs.items(), shape)
    for value in args:
        if shape.tokens is not None:
            break
        if isinstance(value, torch.Tensor):
            _read_tensors((("", value),), shape)
        elif isinstance(value, list | tuple):
            _read_tensors([("", inner) for inner in value], shape)
        elif hasattr(value, "items"):
            _read_tensors(value.items(), shape)
    return shape


def _read_tensors(named: Any, shape: BatchShape) -> None:
    """Read the tensors. A tensor with a name in TOKEN_NAMES overrides an earlier guess."""
    for name, value in named:
        if not isinstance(value, torch.Tensor):
            if isinstance(value, dict):
                _read_tensors(value.items(), shape)
            continue
        num_dimensions = value.dim()
        if not num_dimensions:
            continue
        # Not `shape`: a nested tensor has none, or one with symbols.
        samples, elements = value.size(0), value.numel()
        if shape.samples is None:
            shape.samples, shape.elements = samples, elements
        if num_dimensions != 2:
            continue
        is_named, dtype = name in TOKEN_NAMES, value.dtype
        holds_integers = not (dtype.is_floating_point or dtype is torch.bool)
        if is_named or (shape.tokens is None and holds_integers):
            shape.samples, shape.tokens = samples, elements
            shape.sequence_length = None if value.is_nested else value.size(1)
        if is_named:
            return


# Does what `shape_in_python` does, in C for a batch of tensors, dicts and lists. Shapes that are
# equal and follow each other are often one object, which nobody may change.
batch_shape: Callable[[Sequence[Any], Mapping[str, Any]], BatchShape] = (
    shape_in_python
    if ShapeReader is None
    else ShapeReader(torch.Tensor, torch.bool, TOKEN_NAMES, BatchShape, shape_in_python)
)
