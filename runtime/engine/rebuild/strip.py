"""Takes everything of DeepSpeed off a module, so that an engine can be made of it as of a new one.

What is left over is found silently wrong otherwise: parameters whose methods belong to the old
partitioning, and autograd functions that fetch from the old coordinator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

PARAMETER_LEFTOVERS = frozenset(
    {
        # zero.Init
        "all_gather",
        "all_gather_coalesced",
        "partition",
        "reduce_gradients_at_owner",
        "partition_gradients",
        "aligned_size",
        "padding_size",
        "partition_numel",
        "item",
        "convert_to_zero_parameters",
        "is_external_param",
        "nvme_swapper",
        "_z3_optimizer",
        # stages 1 and 2
        "grad_accum",
        "param_idx_in_group",
        "_hp_mapping",
        "_dp_group",
        "_index_in_param_group",
        "_zero_optimizer",
        "get_full_hp_param",
        "get_full_hp_grad",
        "set_full_hp_param",
        "set_full_hp_grad",
        "load_hp_checkpoint_state",
        "comm_dtype",
    }
)
MODULE_LEFTOVERS = (
    "pre_bwd_fn",
    "post_bwd_fn",
    "ds_grads_remaining",
    "applied_pre_backward_ref_cnt",
    "ds_id",
    "ds_recompute_parameters",
    "ds_inflight_param_registry",
)
# A script may have named parameters that a module uses and another owns; that stays.
_EXTERNAL = ("_external_params", "ds_external_parameters", "all_parameters")
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def strip_module(module: torch.nn.Module) -> None:
    """Make a module of an engine that was torn down a plain one; parameters stay the same objects.

    A partitioned parameter has its shape back and no memory: its weights read as zeros until it is
    given some, and must not be written before. Requires the weights to be kept elsewhere.
    """
    for part in module.modules():
        _strip_module(part)
    for parameter in module.parameters():
        _strip_parameter(parameter)


def release(parameter: torch.nn.Parameter, shape: torch.Size) -> None:
    """Let go of a parameter's memory; it keeps a shape, and reads as zeros."""
    one = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
    parameter.data = one.expand(shape)


def mark_hooks(module: torch.nn.Module) -> Callable[[], None]:
    """Return what takes off all hooks that were put on a module, or its parameters, since now."""
    tables = [
        table
        for part in module.modules()
        for name in _HOOKS
        if (table := part.__dict__.get(name)) is not None
    ]
    known = [(table, frozenset(table)) for table in tables]
    of_parameters = [(parameter, _tables(parameter)) for parameter in module.parameters()]
    known_of_parameters = [
        (parameter, [frozenset(table) for table in found]) for parameter, found in of_parameters
    ]

    def undo() -> None:
        for table, before in known:
            _drop(table, before)
        for parameter, marks in known_of_parameters:
            for table, before in zip(_tables(parameter), marks, strict=True):
                _drop(table, before)

    return undo


def _tables(parameter: Any) -> list[Any]:
    """Return the hooks on a parameter's gradient, and those on its accumulation."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return [getattr(parameter, name, None) or {} for name in names]


def _drop(table: Any, before: frozenset[Any]) -> None:
    for key in [key for key in table if key not in before]:
        del table[key]


def _strip_module(part: torch.nn.Module) -> None:
    own = part.__dict__
    for name in MODULE_LEFTOVERS:
        own.pop(name, None)
    if not own.get("_external_params"):
        for name in _EXTERNAL:
            own.pop(name, None)
    original = own.pop("_original_parameters", None)
    if original is not None:
        present = dict(own["_parameters"])  # some may have come since
        original.clear()
        original.update(present)
        own["_parameters"] = original


def _strip_parameter(parameter: Any) -> None:
    parameter.grad = None
    shape = getattr(parameter, "ds_shape", None)
    own = parameter.__dict__
    for name in [name for name in own if name.startswith("ds_") or name in PARAMETER_LEFTOVERS]:
        del own[name]
    if shape is not None and parameter.numel() != shape.numel():
        release(parameter, shape)
