"""Measures what a model's activations take by a forward and backward pass that computes nothing.

The pass runs on fake tensors: they have shapes and storages, and no memory. Attention is torch's on
CPU, which keeps as little as flash attention does unless it drops out.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .activations import Activations
from .live_bytes import LiveBytes

# What a pass without values may fail with: where it asks for values, there are none.
_PASS_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, None: None}


class UnknownActivationsError(Exception):
    """The model could not be run on tokens; the text says why."""


def trace_activations(
    module: nn.Module, dtype: str | None, *, samples: int, tokens: int
) -> Activations:
    """Run micro-batches of `samples` and of twice as many token ids, forward and backward.

    Args:
        module: The model, on any device; it is left as it is.
        dtype: Data type of parameters in training; None for their own.
        samples: Samples of a micro-batch.
        tokens: Length of a sample.

    Raises:
        UnknownActivationsError: The model does not take token ids, or asks for values.
    """
    try:
        with _without_tracebacks(), FakeTensorMode(allow_non_fake_inputs=True):
            fake = _without_values(module, _DTYPES[dtype])
            one, two = (_peak(fake, size, tokens) for size in (samples, 2 * samples))
    except _PASS_ERRORS as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise UnknownActivationsError(f"{type(error).__name__}: {reason}") from error
    each = max(0, two - one) // samples
    return Activations(tokens=tokens, sample_bytes=each, fixed_bytes=one - samples * each)


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keep torch from logging the traceback of an operation that fails: the error says it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


def _without_values(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a copy in training mode whose parameters and buffers are fake tensors on CPU."""
    fakes: dict[int, Any] = {}
    for buffer in module.buffers():
        fakes[id(buffer)] = _empty_like(buffer, dtype)
    for parameter in module.parameters():
        fake = nn.Parameter(_empty_like(parameter, dtype), requires_grad=parameter.requires_grad)
        if fake.requires_grad:  # as ZeRO does, which takes each away as it is reduced
            fake.register_post_accumulate_grad_hook(_drop_gradient)
        fakes[id(parameter)] = fake
    return copy.deepcopy(module, fakes).train()


def _empty_like(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    changed = dtype if tensor.is_floating_point() else None
    return torch.empty(tensor.shape, dtype=changed or tensor.dtype, device="cpu")


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _peak(module: nn.Module, samples: int, tokens: int) -> int:
    ids = torch.zeros(samples, tokens, dtype=torch.long)
    counted = LiveBytes()
    with counted:
        output = _call(module, ids)
        _loss(output, ids).backward()
    return counted.peak


def _call(module: nn.Module, ids: torch.Tensor) -> Any:
    names = inspect.signature(module.forward).parameters
    if "input_ids" not in names:
        return module(ids)
    labels = {"labels": ids} if "labels" in names else {}
    return module(input_ids=ids, **labels)


def _loss(output: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the model's own loss, or the cross-entropy in fp32 of its logits.

    Raises:
        TypeError: The output holds neither.
    """
    for found in _candidates(output):
        if found.is_floating_point() and found.dim() == 0:
            return found
        if found.is_floating_point() and found.shape[:-1] == ids.shape:
            return nn.functional.cross_entropy(found.flatten(0, 1).float(), ids.flatten())
    raise TypeError("the output is neither a loss nor logits of each token")


def _candidates(output: Any) -> Iterable[torch.Tensor]:
    first = output[0] if isinstance(output, tuple | list) and output else None
    found = (getattr(output, "loss", None), getattr(output, "logits", None), output, first)
    return (tensor for tensor in found if isinstance(tensor, torch.Tensor))
