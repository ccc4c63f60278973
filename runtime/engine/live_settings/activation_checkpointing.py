"""Switches activation checkpointing of a running engine on and off between windows.

A Hugging Face model is switched by its own methods, unless modules are selected. In any other model
the selected modules get a forward that is recomputed in backward, with the same random numbers.
ZeRO 3 traces the new order of modules by itself, which takes two windows without prefetch.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from ....errors import ZerowatchError
from ...common.deepspeed_internals import clear_release_cache
from ...common.undo import Undo, UndoOnce, apply_all, own_attributes, restore_attributes
from .zero_optimizer import synchronize_device, total_elements, zero_3_optimizer

logger = logging.getLogger(__name__)

# Names of a Hugging Face model.
_FLAGS = ("gradient_checkpointing", "_gradient_checkpointing_func")
_HOOKS = ("_require_grads_hooks", "_require_grads_hook")
_NOT_REENTRANT = {"use_reentrant": False}

# A class, its name, a pattern of module names such as `blocks.*`, or several of these; None selects
# the repeated block.
ModuleSelector = type[nn.Module] | str | Sequence[type[nn.Module] | str] | None

CONTAINERS = (nn.ModuleList, nn.Sequential)
# The modules that `checkpoint_forward` wraps at present.
_checkpointed: WeakSet[nn.Module] = WeakSet()
_NUM_CLOSE_MATCHES = 5


class ActivationCheckpointing:
    """Makes an engine recompute activations in backward instead of keeping them.

    Args:
        modules: A class or its name, a pattern of module names such as "blocks.*", or several of
            these; by default a Hugging Face model's own switch, else the repeated block.
    """

    def __init__(self, modules: ModuleSelector = None) -> None:
        self._modules = modules

    def unsupported_reason(self, engine: Any) -> str | None:
        """Return why checkpointing cannot be switched on for these modules; None if it can."""
        if getattr(engine, "pipeline_parallelism", False):
            return "a pipeline engine checkpoints by activation_checkpoint_interval"
        model = engine.module
        if self._modules is None and _has_own_switch(model):
            return "the model's own checkpointing is on already" if _is_on(model) else None
        try:
            choose_modules(model, self._modules)
        except ZerowatchError as no_match:
            return str(no_match)
        return None

    def attach(self, engine: Any) -> Undo:
        """Checkpoint activations and return the undo; all ranks must call it.

        The undo restores the original forward methods and flags.

        Raises:
            ZerowatchError: No module matches, or checkpointing is on already.
        """
        reason = self.unsupported_reason(engine)
        if reason is not None:
            raise ZerowatchError(f"activation checkpointing cannot be switched on: {reason}")
        synchronize_device()
        changes: list[Callable[[], Undo]] = [partial(self._switch_on, engine.module)]
        if zero_3_optimizer(engine) is not None:
            changes.append(_clear_release_cache)
        return apply_all(changes)

    def _switch_on(self, model: nn.Module) -> Undo:
        if self._modules is None and _has_own_switch(model):
            logger.info("activation checkpointing on, by the model's own switch")
            return _enable_own_switch(model)
        modules = choose_modules(model, self._modules)
        logger.info("activation checkpointing on for %s", ", ".join(modules))
        return apply_all(partial(checkpoint_forward, module) for module in modules.values())


def _clear_release_cache() -> Undo:
    clear_release_cache()
    return clear_release_cache


def checkpoint_forward(module: nn.Module) -> Undo:
    """Wrap `forward` of this instance to keep only its input while training with gradients.

    The replacement is a method. So a copy of the module runs its own forward, and a pickled module
    is loaded with its original forward.
    """
    before = own_attributes(module, ["forward"])
    original = module.forward
    unbound = getattr(original, "__func__", None)
    is_on = True

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = original if unbound is None else partial(unbound, self)
        if not (is_on and self.training and torch.is_grad_enabled()):
            return run(*args, **kwargs)
        contexts = partial(_contexts, self)
        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    ours = MethodType(functools.wraps(original)(forward), module)
    forward.__name__ = "forward"  # unpickling looks the method up by this name
    module.forward = ours
    _checkpointed.add(module)

    def undo() -> None:
        nonlocal is_on
        is_on = False  # in case another wrapper now wraps this one
        _checkpointed.discard(module)
        if vars(module).get("forward") is ours:
            restore_attributes(module, before)

    return UndoOnce(undo)


def _contexts(
    module: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return contextlib.nullcontext(), _copied_statistics(module)


@contextlib.contextmanager
def _copied_statistics(module: nn.Module) -> Iterator[None]:
    """Let recomputation update copies of the running statistics.

    The original statistics include this batch already.
    """
    own = [(each, dict(each._buffers)) for each in module.modules() if isinstance(each, _NormBase)]
    for norm, buffers in own:
        for name, buffer in buffers.items():
            norm._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for norm, buffers in own:
            norm._buffers.update(buffers)


def _has_own_switch(model: nn.Module) -> bool:
    """Whether this is a Hugging Face model with a method that switches checkpointing on."""
    return bool(getattr(model, "supports_gradient_checkpointing", False)) and hasattr(
        model, "gradient_checkpointing_enable"
    )


def checkpoints_activations(model: nn.Module) -> bool:
    """Return whether activations are recomputed, by the model's own switch or by this module."""
    return _is_on(model) or not _checkpointed.isdisjoint(model.modules())


def _is_on(model: nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _enable_own_switch(model: Any) -> Undo:
    """Switch checkpointing on without reentrant autograd; the undo restores flags and hooks."""
    flags = [(module, own_attributes(module, _FLAGS)) for module in model.modules()]
    hooks = own_attributes(model, _HOOKS)
    if hasattr(model, "activation_checkpointing_enable"):  # the older name warns from 5.23 on
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=_NOT_REENTRANT)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=_NOT_REENTRANT)
    added = _handles(own_attributes(model, _HOOKS), known=_handles(hooks))

    def undo() -> None:
        for handle in added:
            handle.remove()
        restore_attributes(model, hooks)
        for module, before in flags:
            restore_attributes(module, before)

    return UndoOnce(undo)


def _handles(attributes: dict[str, object], known: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """Return the handles of hooks that make the inputs of blocks require gradients."""
    found: list[Any] = []
    for value in attributes.values():
        several = value if isinstance(value, list) else [value]
        found += [each for each in several if hasattr(each, "remove")]
    return tuple(each for each in found if all(each is not other for other in known))


def choose_modules(model: nn.Module, selector: ModuleSelector) -> dict[str, nn.Module]:
    """Return the selected modules by name, without modules nested in other selected modules.

    Raises:
        ZerowatchError: No module of the model matches.
    """
    if selector is None:
        return repeated_block(model)
    selectors = [selector] if isinstance(selector, str | type) else list(selector)
    chosen_modules: dict[str, nn.Module] = {}
    for entry in selectors:
        matching = {name: module for name, module in _named(model) if _matches(name, module, entry)}
        if not matching:
            raise ZerowatchError(_no_match_message(model, entry))
        chosen_modules |= matching
    if not chosen_modules:
        raise ZerowatchError("the choice of modules to checkpoint is empty")
    return _outermost(chosen_modules)


def repeated_block(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of the container of equal modules that has the most parameters.

    Raises:
        ZerowatchError: The model does not repeat a block, or repeats only single layers.
    """
    candidates = [
        {f"{name}.{key}".lstrip("."): each for key, each in container.named_children()}
        for name, container in model.named_modules()
        if isinstance(container, CONTAINERS) and _repeats_a_block(container)
    ]
    if not candidates:
        raise ZerowatchError(
            f"{type(model).__name__} has no nn.ModuleList or nn.Sequential of several equal "
            "blocks; select the modules to checkpoint by a class or a pattern of names such as "
            '"blocks.*"'
        )
    return max(candidates, key=_size)  # the first of equal ones: the outermost


def _size(blocks: dict[str, nn.Module]) -> int:
    return sum(total_elements(block.parameters()) for block in blocks.values())


def _repeats_a_block(container: nn.Module) -> bool:
    kinds = [type(child) for child in container.children()]
    return len(kinds) > 1 and len(set(kinds)) == 1 and not _is_single_layer(container)


def _is_single_layer(container: nn.Module) -> bool:
    """Return whether the children are torch's own layers.

    Checkpointing a single layer saves little, because the layer still keeps its input.
    """
    child = next(container.children())
    return type(child).__module__.startswith("torch.nn.") and not any(child.children())


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules except the model, because recomputing the whole model saves nothing."""
    return ((name, module) for name, module in model.named_modules() if name)


def _matches(name: str, module: nn.Module, selector: type[nn.Module] | str) -> bool:
    if isinstance(selector, str):
        return type(module).__name__ == selector or fnmatch.fnmatchcase(name, selector)
    return isinstance(module, selector)


def _outermost(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    inside = {
        id(inner) for each in modules.values() for inner in each.modules() if inner is not each
    }
    return {name: each for name, each in modules.items() if id(each) not in inside}


def _no_match_message(model: nn.Module, selector: type[nn.Module] | str) -> str:
    wanted = selector if isinstance(selector, str) else selector.__name__
    names = [name for name, _ in _named(model)]
    known = [*dict.fromkeys(type(module).__name__ for _, module in _named(model)), *names]
    close = difflib.get_close_matches(wanted, known, n=_NUM_CLOSE_MATCHES, cutoff=0.5)
    shown = close or known[:_NUM_CLOSE_MATCHES]
    kind = "class or module name" if isinstance(selector, str) else "class"
    text = f"no module of {type(model).__name__} has the {kind} {wanted!r}; "
    if not shown:
        return text + "it has no modules within it"
    return text + f"{'close' if close else 'there'} are {', '.join(map(repr, shown))}"
