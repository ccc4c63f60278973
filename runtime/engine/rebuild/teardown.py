"""Ends an engine so that nothing holds its tensors any more."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import parameter_offload, partition_parameters
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import groups

from .layout import base_optimizer


def teardown(engine: Any) -> None:
    """Take an engine's hooks off its module and free its tensors, whoever still holds the engine.

    What is left of the engine has its module and its counters, and cannot train. The module is not
    plain yet: `strip_module` makes it so.
    """
    optimizer, module = engine.optimizer, engine.module
    engine.destroy()
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    _empty(engine, optimizer)
    forget(module)


def forget(module: torch.nn.Module) -> None:
    """Take what DeepSpeed keeps of a module for the whole process out of it again, and collect."""
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [other for other in stack if other is not module]
    _clear_cache()
    _drop_secondary_group()
    if not stack:  # no other engine of stage 3
        _put_linear_back()
    gc.collect()
    get_accelerator().empty_cache()


def _empty(engine: Any, optimizer: Any) -> None:
    """Let the engine and its optimizer hold nothing, for callers may hold them a while."""
    for name in ("optimizer", "basic_optimizer", "lr_scheduler"):
        setattr(engine, name, None)
    base = base_optimizer(optimizer)
    let_go(base)
    if base is not optimizer:
        vars(optimizer).clear()


def let_go(base: Any) -> None:
    """Let a torch optimizer hold no tensors; anything that is none holds what it likes."""
    if isinstance(base, torch.optim.Optimizer):
        base.state.clear()
        for group in base.param_groups:
            group["params"] = []


def _clear_cache() -> None:
    """Clear what the coordinators of stage 3 remember: it holds them, and so their engines."""
    remembered = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    for cell in remembered.__closure__ or ():
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()
    if hasattr(remembered, "cache_clear"):
        remembered.cache_clear()


def _drop_secondary_group() -> None:
    """Let the next engine make its own group for secondary partitions, or none."""
    group, groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP, None
    if group is not None and group is not dist.group.WORLD:
        dist.destroy_process_group(group)


def _put_linear_back() -> None:
    """Undo what making a model ready for stage 3 did to torch's linear, which rounds otherwise."""
    kind = partition_parameters.InsertPostInitMethodToModuleSubClasses
    if torch.nn.functional.linear is partition_parameters.zero3_linear_wrap:
        torch.nn.functional.linear = kind.linear_bk
