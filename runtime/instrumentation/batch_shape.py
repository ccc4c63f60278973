"""Reads the number of samples and tokens of a batch from the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..common.hot_path import ShapeReader

# Names of tensors that hold token ids, in Hugging Face's and Megatron's batches.
TOKEN_NAMES = frozenset(
    {"input_ids", "tokens", "token_ids", "decoder_input_ids", "masked_input_ids"}
)
# Names of tensors of shape [samples, length, width] that hold a vector for each token.
VECTOR_NAMES = frozenset({"inputs_embeds"})
# A tensor with one of these in its name has the shape of the tokens, unless the input is features
# such as sound: its mask has an element for each of them, and its labels are a shorter text.
DOUBTFUL_PARTS = ("mask", "label")


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
    determines the tokens: one with a name in TOKEN_NAMES, else the vectors with a name in
    VECTOR_NAMES, else the first of an integer type. Masks and labels come last, and not beside
    features: other floats of two or more dimensions. A sequence of images with as many targets, as
    of torchvision's detectors, has a sample for each image.

    The code avoids generators and abstract base classes, because it runs in every forward pass.
    """
    search = _Search()
    shape = search.shape
    if kwargs:
        search.read(kwargs.items())
    if shape.tokens is None and are_images(args):
        return BatchShape(len(args[0]), sum([image.numel() for image in args[0]]))
    for value in args:
        if shape.tokens is not None:
            break
        if isinstance(value, torch.Tensor):
            search.read((("", value),))
        elif isinstance(value, list | tuple):
            search.read([("", inner) for inner in value])
        elif hasattr(value, "items"):
            search.read(value.items())
    if shape.tokens is None and search.doubtful is not None and not search.has_features:
        search.set_tokens(search.doubtful)
    return shape


def are_images(args: Sequence[Any]) -> bool:
    """Return whether the first arguments are images [channels, height, width] and a dict of each.

    Two tensors of a batch of series also have three dimensions each, but no such dicts.
    """
    if len(args) < 2:
        return False
    images, targets = args[0], args[1]
    if not (isinstance(images, list | tuple) and isinstance(targets, list | tuple)):
        return False
    if not images or len(images) != len(targets):
        return False
    for image, target in zip(images, targets, strict=True):
        if not isinstance(image, torch.Tensor) or image.dim() != 3 or not isinstance(target, dict):
            return False
    return True


class _Search:
    """A search for the size of a batch.

    Attributes:
        shape: The size, as far as it was found.
        doubtful: The first tensor that holds the tokens if the batch has no features.
        has_features: Whether the batch has features.
    """

    __slots__ = ("doubtful", "has_features", "shape")

    def __init__(self) -> None:
        self.shape = BatchShape()
        self.doubtful: torch.Tensor | None = None
        self.has_features = False

    def read(self, named: Any) -> None:
        """Read the tensors. One that is known by its name overrides an earlier guess."""
        shape = self.shape
        for name, value in named:
            if not isinstance(value, torch.Tensor):
                if isinstance(value, dict):
                    self.read(value.items())
                continue
            num_dimensions = value.dim()
            if not num_dimensions:
                continue
            # Not `shape`: a nested tensor has none, or one with symbols.
            if shape.samples is None:
                shape.samples, shape.elements = value.size(0), value.numel()
            if num_dimensions == 2 and name in TOKEN_NAMES:
                self.set_tokens(value)
                return
            if name in VECTOR_NAMES:
                if num_dimensions == 3 and not value.is_nested:
                    shape.samples, shape.sequence_length = value.size(0), value.size(1)
                    shape.tokens = shape.samples * shape.sequence_length
                continue
            if num_dimensions == 1 or shape.tokens is not None:
                continue
            dtype = value.dtype
            if dtype.is_floating_point:
                self.has_features |= not is_doubtful(name)
            elif num_dimensions == 2 and dtype is not torch.bool:
                if not is_doubtful(name):
                    self.set_tokens(value)
                elif self.doubtful is None:
                    self.doubtful = value

    def set_tokens(self, tensor: torch.Tensor) -> None:
        """The tokens are those of this tensor."""
        shape = self.shape
        shape.samples, shape.tokens = tensor.size(0), tensor.numel()
        shape.sequence_length = None if tensor.is_nested else tensor.size(1)


def is_doubtful(name: Any) -> bool:
    """Return whether the name of a tensor has a part in DOUBTFUL_PARTS."""
    if isinstance(name, str):
        for part in DOUBTFUL_PARTS:
            if part in name:
                return True
    return False


def reader_in_c(in_python: Callable[..., Any]) -> Any:
    """Return what reads a batch of tensors, dicts and lists in C, and others by a function."""
    return ShapeReader(
        tensor_type=torch.Tensor,
        bool_type=torch.bool,
        token_names=TOKEN_NAMES,
        vector_names=VECTOR_NAMES,
        doubtful_parts=DOUBTFUL_PARTS,
        shape_type=BatchShape,
        in_python=in_python,
    )


# Does what `shape_in_python` does. Shapes that are equal and follow each other are often one
# object, which nobody may change.
batch_shape: Callable[[Sequence[Any], Mapping[str, Any]], BatchShape] = (
    shape_in_python if ShapeReader is None else reader_in_c(shape_in_python)
)
