"""Prepares a new engine for recovery from out-of-memory errors.

Adam and similar optimizers create their state in the first step. If memory runs out in that step,
some weights have been updated already, so the step cannot be repeated. This module creates the
state before the first step, so that such an error is raised at the start of the run.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any

import torch

from ...common.deepspeed_internals import HYBRID_ENGINE, class_path
from .abort_window import abort_unsupported_reason

logger = logging.getLogger(__name__)

_HYBRID = (
    "hybrid_engine: a TrainingRun leaves generation alone. It neither runs a failed call of "
    "generate again nor changes its batch, and it does not rebuild the engine (ZeRO stage, "
    "offload). The tuner compares the time of training steps without generation, and no knob "
    "changes generation"
)


def prepare_engine(engine: Any) -> None:
    """Prepare a new engine for recovery from out-of-memory errors; log a warning if it fails."""
    reason = abort_unsupported_reason(engine)
    if reason is not None:
        logger.warning(
            "each error in the passes of train_batch will end this run (out of memory, a loss that "
            "is not finite, an error of `loss`), because a batch cannot be discarded: %s",
            reason,
        )
    if class_path(engine) == HYBRID_ENGINE:
        logger.warning(_HYBRID)
    reason = materialise_optimizer_states(engine)
    if reason is not None:
        logger.info("the optimizer's state is created in the first step: %s", reason)


def materialise_optimizer_states(engine: Any) -> str | None:
    """Create the state that the first `engine.step()` would create, with the same values.

    This works for torch's own optimizers, except SGD with momentum, and for DeepSpeed's Adam and
    Lion.

    Returns:
        Why the state was not created; None if it was created.

    Raises:
        RuntimeError: There is not enough memory for the state, so the first step would fail too.
    """
    if getattr(engine.optimizer, "swap_optimizer", False):
        return "its state is on NVMe"
    for optimizer, group, parameter in _updated_tensors(engine):
        if not optimizer.state.get(parameter):
            create = _state_creator(optimizer)
            if create is None:
                return f"{type(optimizer).__name__} is not supported"
            create(optimizer, group, parameter)
            if not optimizer.state[parameter]:
                del optimizer.state[parameter]
                return f"{type(optimizer).__name__} creates it while it updates"
    return None


def _updated_tensors(engine: Any) -> Iterator[tuple[Any, dict[str, Any], torch.Tensor]]:
    """Yield the optimizer, the parameter group and the tensor of each update on this rank."""
    zero, basic = engine.optimizer, engine.basic_optimizer
    partitions = getattr(zero, "fp32_partitioned_groups_flat", None)
    if partitions is None:
        for group in basic.param_groups:
            for parameter in group["params"]:
                yield basic, group, parameter
        return
    devices = getattr(zero, "subgroup_to_device", {})  # stage 3 updates partitions one by one
    for index, partition in enumerate(partitions):
        on_host = devices.get(index, "cpu") == "cpu" or not hasattr(zero, "backup_optimizer")
        optimizer = basic if on_host else zero.backup_optimizer
        yield optimizer, optimizer.param_groups[zero.sub_group_to_group_id[index]], partition


def _state_creator(optimizer: Any) -> Any:
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim") and hasattr(optimizer, "_init_group"):
        return _create_torch_state
    if kind.__module__.startswith("deepspeed."):
        return _DEEPSPEED_CREATORS.get(kind.__name__)
    return None


def _create_torch_state(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> None:
    """Call the optimizer's own method, which creates state for parameters with a gradient."""
    lists: list[list[Any]] = [[] for _ in inspect.signature(optimizer._init_group).parameters][1:]
    gradient = parameter.grad
    # Expand one element, because a full gradient might not fit in memory together with the state.
    parameter.grad = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand_as(
        parameter
    )
    try:
        optimizer._init_group({**group, "params": [parameter]}, *lists)
    finally:
        parameter.grad = gradient


def _create_fused_state(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> None:
    state = {name: torch.zeros_like(parameter.data) for name in _moments(optimizer)}
    optimizer.state[parameter] = {"step": group.get("step", 0), **state}


def _create_host_state(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> None:
    dtype = torch.float if optimizer.fp32_optimizer_states else parameter.dtype
    state = {
        name: torch.zeros_like(parameter.data, dtype=dtype, device="cpu")
        for name in _moments(optimizer)
    }
    optimizer.state[parameter] = {"step": 0, **state}


def _moments(optimizer: Any) -> tuple[str, ...]:
    # DeepSpeed's Lion on the host creates the second moment too, and never uses it.
    return ("exp_avg",) if type(optimizer).__name__ == "FusedLion" else ("exp_avg", "exp_avg_sq")


_DEEPSPEED_CREATORS = {
    "FusedAdam": _create_fused_state,
    "FusedLion": _create_fused_state,
    "DeepSpeedCPUAdam": _create_host_state,
    "DeepSpeedCPULion": _create_host_state,
}
