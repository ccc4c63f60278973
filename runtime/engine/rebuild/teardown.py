"""Removes an engine: frees its tensors, and removes DeepSpeed's attributes from its module.

If an attribute stayed, the next engine would be wrong without an error: parameters would have
methods of the old partitioning, and autograd functions would gather with the old coordinator.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import parameter_offload, partition_parameters
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import groups

from .optimizer_layout import base_optimizer

_PARAMETER_ATTRIBUTES = frozenset(
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
_MODULE_ATTRIBUTES = (
    "pre_bwd_fn",
    "post_bwd_fn",
    "ds_grads_remaining",
    "applied_pre_backward_ref_cnt",
    "ds_id",
    "ds_recompute_parameters",
    "ds_inflight_param_registry",
)
# A script may have registered parameters that one module uses and another module owns. These
# registrations stay.
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


def teardown(engine: Any) -> None:
    """Remove an engine's hooks from its module and free its tensors, even if callers hold it.

    The engine keeps its module and its counters, and cannot train. The module keeps DeepSpeed's
    attributes: `strip_module` removes them.
    """
    optimizer, module = engine.optimizer, engine.module
    try:
        engine.destroy()
        engine.module_forward_pre_hook.remove()
        engine.module_forward_post_hook.remove()
    finally:  # an engine that was removed in part must not look as if it could train
        _clear(engine, optimizer)
    forget_module(module)


def forget_module(module: torch.nn.Module) -> None:
    """Remove a module from DeepSpeed's process-wide state, and collect garbage."""
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [other for other in stack if other is not module]
    _clear_release_cache()
    _drop_secondary_group()
    if not stack:  # no other engine of stage 3
        _restore_linear()
    gc.collect()
    get_accelerator().empty_cache()


def _clear(engine: Any, optimizer: Any) -> None:
    """Drop the tensors of the engine and its optimizer, because callers may keep both objects."""
    for name in ("optimizer", "basic_optimizer", "lr_scheduler"):
        setattr(engine, name, None)
    base = base_optimizer(optimizer)
    release_tensors(base)
    if base is not optimizer:
        vars(optimizer).clear()


def release_tensors(base: Any) -> None:
    """Drop the tensors of a torch optimizer; leave any other object unchanged."""
    if isinstance(base, torch.optim.Optimizer):
        base.state.clear()
        for group in base.param_groups:
            group["params"] = []


def _clear_release_cache() -> None:
    """Clear a cache that keeps stage 3's coordinators and their engines alive."""
    cached = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    for cell in cached.__closure__ or ():
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()
    if hasattr(cached, "cache_clear"):
        cached.cache_clear()


def _drop_secondary_group() -> None:
    """Destroy the group of secondary partitions; the next engine makes a new group if needed."""
    group, groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP, None
    if group is not None and group is not dist.group.WORLD:
        dist.destroy_process_group(group)


def _restore_linear() -> None:
    """Restore torch's linear, which stage 3 replaces by a function that rounds differently."""
    kind = partition_parameters.InsertPostInitMethodToModuleSubClasses
    if torch.nn.functional.linear is partition_parameters.zero3_linear_wrap:
        torch.nn.functional.linear = kind.linear_bk


def strip_module(module: torch.nn.Module) -> None:
    """Remove DeepSpeed's attributes from a module after a teardown; its parameters stay.

    A partitioned parameter gets its full shape back, but no memory. Its weights read as zeros and
    must not be written until memory is allocated. The caller must keep a copy of the weights.
    """
    for part in module.modules():
        _strip_module(part)
    for parameter in module.parameters():
        _strip_parameter(parameter)


def release_memory(parameter: torch.nn.Parameter, shape: torch.Size) -> None:
    """Free a parameter's memory; it keeps a shape, and reads as zeros."""
    one = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
    parameter.data = one.expand(shape)


def track_hooks(module: torch.nn.Module) -> Callable[[], None]:
    """Return a function that removes all hooks added to a module or its parameters from now on."""
    tables = [
        table
        for part in module.modules()
        for name in _HOOKS
        if (table := part.__dict__.get(name)) is not None
    ]
    known = [(table, frozenset(table)) for table in tables]
    of_parameters = [(parameter, _hook_tables(parameter)) for parameter in module.parameters()]
    known_of_parameters = [
        (parameter, [frozenset(table) for table in found]) for parameter, found in of_parameters
    ]

    def undo() -> None:
        for table, before in known:
            _remove_new(table, before)
        for parameter, marks in known_of_parameters:
            for table, before in zip(_hook_tables(parameter), marks, strict=True):
                _remove_new(table, before)

    return undo


def _hook_tables(parameter: Any) -> list[Any]:
    """Return the hooks on a parameter's gradient and on its accumulation."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return [getattr(parameter, name, None) or {} for name in names]


def _remove_new(table: Any, before: frozenset[Any]) -> None:
    for key in [key for key in table if key not in before]:
        del table[key]


def _strip_module(part: torch.nn.Module) -> None:
    own = part.__dict__
    for name in _MODULE_ATTRIBUTES:
        own.pop(name, None)
    if not own.get("_external_params"):
        for name in _EXTERNAL:
            own.pop(name, None)
    original = own.pop("_original_parameters", None)
    if original is not None:
        present = dict(own["_parameters"])  # some may have been added since
        original.clear()
        original.update(present)
        own["_parameters"] = original


def _strip_parameter(parameter: Any) -> None:
    parameter.grad = None
    shape = getattr(parameter, "ds_shape", None)
    own = parameter.__dict__
    for name in [name for name in own if name.startswith("ds_") or name in _PARAMETER_ATTRIBUTES]:
        del own[name]
    if shape is not None and parameter.numel() != shape.numel():
        release_memory(parameter, shape)
