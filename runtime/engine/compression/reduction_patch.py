"""What all stages' reductions have in common: methods of one object, replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from ...common.patching import AttributePatch

Names = dict[int, str]
"""A parameter's name by its id()."""


def names_of(module: torch.nn.Module) -> Names:
    """Return the names of a module's parameters."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


class ReductionPatch(Protocol):
    """Where one kind of engine reduces its gradients."""

    def close(self) -> None:
        """Put everything back."""

    def drop(self) -> None:
        """Forget the reductions that are under way."""


class PatchSet:
    """Methods of one object in whose place others are called, until closed."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._wraps: list[AttributePatch] = []
        self._closed = False

    def replace(self, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a method by what `make` makes of the original."""

        def made(original: Callable[..., Any]) -> Callable[..., Any]:
            own = make(original)

            def call(*args: Any, **kwargs: Any) -> Any:
                return (original if self._closed else own)(*args, **kwargs)

            return call

        self._wraps.append(AttributePatch(self._owner, name, made))

    def close(self) -> None:
        """Put the originals back; where somebody wrapped over ours, it passes calls on."""
        self._closed = True
        for wrap in reversed(self._wraps):
            wrap.restore()


def trainable(parameters: Iterator[torch.nn.Parameter]) -> Iterator[torch.nn.Parameter]:
    """Yield those whose gradients DeepSpeed reduces, in its order."""
    return (p for p in parameters if p.requires_grad and p.numel())
