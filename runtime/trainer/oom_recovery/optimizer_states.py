"""Makes the optimizer's state before the first step, so that it runs out of memory at the start.

Adam and its kin make theirs in their first step; an error there comes after some weights were
updated, and such a step cannot be done again.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch


def materialise_optimizer_states(engine: Any) -> str | None:
    """Make the state that the first `engine.step()` would make, with the same values.

    Returns:
        Why nothing was made, or None: by the types of optimizers this knows torch's own, apart from
        SGD's momentum, and DeepSpeed's Adam and Lion.

    Raises:
        RuntimeError: There is no memory for it; training could not have begun either.
    """
    if getattr(engine.optimizer, "swap_optimizer", False):
        return "its state lies on NVMe"
    for optimizer, group, parameter in _updated(engine):
        if not optimizer.state.get(parameter):
            make = _maker(optimizer)
            if make is None:
                return f"{type(optimizer).__name__} is not known"
            make(optimizer, group, parameter)
            if not optimizer.state[parameter]:
                del optimizer.state[parameter]
                return f"{type(optimizer).__name__} makes it as it updates"
    return None


def _updated(engine: Any) -> Iterator[tuple[Any, dict[str, Any], torch.Tensor]]:
    """Yield each tensor that is updated on this rank, with its optimizer and parameter group."""
    zero, basic = engine.optimizer, engine.basic_optimizer
    partitions = getattr(zero, "fp32_partitioned_groups_flat", None)
    if partitions is None:
        for group in basic.param_groups:
            for parameter in group["params"]:
                yield basic, group, parameter
        return
    devices = getattr(zero, "subgroup_to_device", {})  # stage 3 hands over partitions one by one
    for index, partition in enumerate(partitions):
        on_host = devices.get(index, "cpu") == "cpu" or not hasattr(zero, "backup_optimizer")
        optimizer = basic if on_host else zero.backup_optimizer
        yield optimizer, optimizer.param_groups[zero.sub_group_to_group_id[index]], partition


def _maker(optimizer: Any) -> Any:
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim") and hasattr(optimizer, "_init_group"):
        return _make_torchs
    return _DEEPSPEEDS.get(kind.__name__) if kind.__module__.startswith("deepspeed.") else None


def _make_torchs(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> None:
    """Have the optimizer's own method make the state, which it does for what has a gradient."""
    lists: list[list[Any]] = [[] for _ in inspect.signature(optimizer._init_group).parameters][1:]
    gradient = parameter.grad
    # One element that stands for all: a gradient of full size might not fit beside the state.
    parameter.grad = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand_as(
        parameter
    )
    try:
        optimizer._init_group({**group, "params": [parameter]}, *lists)
    finally:
        parameter.grad = gradient


def _make_fused(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> None:
    state = {name: torch.zeros_like(parameter.data) for name in _moments(optimizer)}
    optimizer.state[parameter] = {"step": group.get("step", 0), **state}


def _make_on_host(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> None:
    dtype = torch.float if optimizer.fp32_optimizer_states else parameter.dtype
    state = {
        name: torch.zeros_like(parameter.data, dtype=dtype, device="cpu")
        for name in _moments(optimizer)
    }
    optimizer.state[parameter] = {"step": 0, **state}


def _moments(optimizer: Any) -> tuple[str, ...]:
    # DeepSpeed's own Lion on the host makes the second one too, and never uses it.
    return ("exp_avg",) if type(optimizer).__name__ == "FusedLion" else ("exp_avg", "exp_avg_sq")


_DEEPSPEEDS = {
    "FusedAdam": _make_fused,
    "FusedLion": _make_fused,
    "DeepSpeedCPUAdam": _make_on_host,
    "DeepSpeedCPULion": _make_on_host,
}
