"""Finds the order in which a model calls its modules, by a forward pass that computes nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

# What a forward pass on the meta device may fail with: where it asks for values, there are none.
_FORWARD_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def run_order(module: nn.Module) -> tuple[str, ...] | None:
    """Return the modules' names in the order of their first call.

    None where it cannot be found out: the module must be on the meta device and know an example of
    its inputs, as the models of Hugging Face do by `dummy_inputs`.
    """
    inputs = _example_inputs(module)
    if inputs is None or not all(p.is_meta for p in module.parameters()):
        return None
    called: dict[str, None] = {}
    hooks = [
        inner.register_forward_pre_hook(lambda _module, _inputs, name=name: called.setdefault(name))
        for name, inner in module.named_modules()
    ]
    try:
        module.eval()(**inputs)  # so that nothing is left out at random
    except _FORWARD_ERRORS:
        return None
    finally:
        module.train()
        for hook in hooks:
            hook.remove()
    return tuple(called)


def _example_inputs(module: nn.Module) -> Mapping[str, torch.Tensor] | None:
    inputs = getattr(module, "dummy_inputs", None)
    if not isinstance(inputs, Mapping):
        return None
    return {name: value.to("meta") for name, value in inputs.items() if torch.is_tensor(value)}
