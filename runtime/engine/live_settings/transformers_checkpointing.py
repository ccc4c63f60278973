"""Activation checkpointing of a Hugging Face model, by its own switch."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...common.undo import Undo, UndoOnce, own_attributes, restore_attributes

_KEPT = {"use_reentrant": False}
_FLAGS = ("gradient_checkpointing", "_gradient_checkpointing_func")
_HOOKS = ("_require_grads_hooks", "_require_grads_hook")


def has_own_switch(model: nn.Module) -> bool:
    """Whether the model checkpoints itself when told to."""
    return bool(getattr(model, "supports_gradient_checkpointing", False)) and hasattr(
        model, "gradient_checkpointing_enable"
    )


def is_on(model: nn.Module) -> bool:
    """Whether it does so now."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def enable(model: Any) -> Undo:
    """Switch it on, without reentrant autograd, and return what puts flags and hooks back."""
    flags = [(module, own_attributes(module, _FLAGS)) for module in model.modules()]
    hooks = own_attributes(model, _HOOKS)
    if hasattr(model, "activation_checkpointing_enable"):  # the older name warns from 5.23 on
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=_KEPT)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=_KEPT)
    added = _hooks(own_attributes(model, _HOOKS), besides=_hooks(hooks))

    def undo() -> None:
        for hook in added:
            hook.remove()
        restore_attributes(model, hooks)
        for module, before in flags:
            restore_attributes(module, before)

    return UndoOnce(undo)


def _hooks(attributes: dict[str, object], besides: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """Return the handles of hooks that make the inputs of blocks require gradients."""
    found: list[Any] = []
    for value in attributes.values():
        several = value if isinstance(value, list) else [value]
        found += [each for each in several if hasattr(each, "remove")]
    return tuple(each for each in found if all(each is not other for other in besides))
