"""A module's forward that keeps its input only, and runs again in backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from ...common.undo import Undo, UndoOnce, own_attributes, restore_attributes


def checkpoint_forward(module: nn.Module) -> Undo:
    """Wrap `forward` on this instance; active while training with gradients.

    What is put there is a method, so that a copy of the module runs its own forward, and a pickled
    one comes back as it was before.
    """
    before = own_attributes(module, ["forward"])
    original = module.forward
    unbound = getattr(original, "__func__", None)
    is_on = True

    def forward(self: nn.Module, *given: Any, **named: Any) -> Any:
        run = original if unbound is None else functools.partial(unbound, self)
        if not (is_on and self.training and torch.is_grad_enabled()):
            return run(*given, **named)
        contexts = functools.partial(_contexts, self)
        return checkpoint(run, *given, use_reentrant=False, context_fn=contexts, **named)

    ours = MethodType(functools.wraps(original)(forward), module)
    forward.__name__ = "forward"  # by which the method is found again when unpickled
    module.forward = ours

    def undo() -> None:
        nonlocal is_on
        is_on = False  # where somebody wrapped over it since
        if vars(module).get("forward") is ours:
            restore_attributes(module, before)

    return UndoOnce(undo)


def _contexts(
    module: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return contextlib.nullcontext(), _other_statistics(module)


@contextlib.contextmanager
def _other_statistics(module: nn.Module) -> Iterator[None]:
    """Lend forward other running means while it runs again: its own have seen this batch."""
    own = [(each, dict(each._buffers)) for each in module.modules() if isinstance(each, _NormBase)]
    for norm, buffers in own:
        for name, buffer in buffers.items():
            norm._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for norm, buffers in own:
            norm._buffers.update(buffers)
