"""The loss in what a forward pass returned, found without keeping the output alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..common.device_scalar import Number, number


def _no_output() -> None:
    """Stand for an output that is gone."""


def _weak_output(output: Any) -> Callable[[], Any]:
    """Refer to what forward returned, or to what may be the loss in it, without keeping it."""
    if isinstance(output, dict):  # a ModelOutput is one too
        output = output.get("loss")
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    return weakref.ref(output) if isinstance(output, torch.Tensor) else _no_output


def extract_loss(output: Any) -> Number:
    """Read a loss; what is no tensor with one element is none."""
    if isinstance(output, torch.Tensor) and output.numel() == 1:
        return number(output.detach())
    return None
