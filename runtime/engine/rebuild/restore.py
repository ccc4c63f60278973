"""Restores a snapshot into an engine that was just made, parameter by parameter."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

from ...common.all_or_none import CollectiveAttempt
from .layout import OptimizerTensor, ParamSlice, base_optimizer, group_members, layout_of
from .snapshot import HostSlice, ParamSnapshot, TrainingStateSnapshot, restore_counters

# A new engine's optimizer may be of another class, such as DeepSpeed's own on the host. Its update
# count is then a number or a tensor.
_DEEPSPEED_ADAMS = ("DeepSpeedCPUAdam", "FusedAdam")
ADAMS = frozenset({*_DEEPSPEED_ADAMS, "Adam", "AdamW"})


def restore_snapshot(
    engine: Any, snapshot: TrainingStateSnapshot, host_sum: HostSum, attempt: CollectiveAttempt
) -> None:
    """Restore all training state in an engine; called by all ranks at the same time.

    Raises:
        ValueError: Its optimizer has other parameters or states than the old one had.
        PeerFailedError: Another rank has failed.
    """
    layout = layout_of(engine)
    _check_optimizer(engine, snapshot)
    _make_states(layout, snapshot)
    slices: dict[str, list[tuple[OptimizerTensor, ParamSlice]]] = {}
    for tensor in layout:
        for piece in tensor.pieces:
            slices.setdefault(piece.name, []).append((tensor, piece))
    restorer = _StateRestorer(host_sum, attempt)
    parameters = dict(engine.module.named_parameters())
    for name, kept in snapshot.parameters.items():
        if kept.updated:
            restorer.restore_updated(kept, slices.get(name, []), parameters[name])
        else:
            restorer.restore_weights(kept, parameters[name])
    _update_partitions(engine.optimizer)
    _restore_options(engine.optimizer, snapshot)
    restore_counters(snapshot.counters, engine)


class HostSum:
    """Sums of tensors over the ranks on the host, to assemble a tensor from the ranks' parts.

    Uses its own gloo group: its collectives are not part of the training's communication.
    """

    def __init__(self, world_size: int) -> None:
        self._group = dist.new_group(backend="gloo") if world_size > 1 else None

    def add_up(self, parts: torch.Tensor) -> None:
        """Sum a tensor in place, bit for bit; on each element at most one rank is not zero."""
        if self._group is not None:
            # As integers: adding zero would turn -0.0 into 0.0.
            dtype = {4: torch.int32, 8: torch.int64}.get(parts.element_size(), torch.uint8)
            self._group.allreduce([parts.view(dtype)]).wait()

    def close(self) -> None:
        """Destroy the group. Safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


class _StateRestorer:
    """Restores one parameter after another."""

    def __init__(self, host_sum: HostSum, attempt: CollectiveAttempt) -> None:
        self._host_sum = host_sum
        self._attempt = attempt

    def restore_updated(
        self, kept: ParamSnapshot, slices: list[tuple[OptimizerTensor, ParamSlice]], parameter: Any
    ) -> None:
        """Write a parameter's master weights and states to the slices of this rank's optimizer."""
        whole = self._whole(kept, kept.master, kept.master_dtype)
        for optimizer_tensor, piece in slices:
            _write(optimizer_tensor.tensor, piece, whole)
        if not hasattr(parameter, "ds_tensor"):  # the model's own weights, rounded to their dtype
            parameter.data.copy_(whole.view(kept.shape))
        for key, dtype in kept.states.items():
            _write_state(slices, key, self._whole(kept, kept.parts.get(key), dtype))

    def restore_weights(self, kept: ParamSnapshot, parameter: Any) -> None:
        """Write the weights of a parameter that no optimizer updates."""
        whole = self._whole(kept, kept.master, kept.dtype)
        partition = getattr(parameter, "ds_tensor", None)
        if partition is None:
            with torch.no_grad():
                parameter.copy_(whole.view(kept.shape))
            return
        start = partition.ds_numel * parameter.ds_zero_partition_rank
        length = max(0, min(partition.ds_numel, whole.numel() - start))
        partition.data[:length].copy_(whole[start : start + length])
        parameter.ds_secondary_tensor = None  # computed from the old weights

    def _whole(
        self, kept: ParamSnapshot, own: HostSlice | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Assemble the ranks' parts to one whole parameter, on the host."""
        whole = torch.zeros(kept.shape.numel(), dtype=dtype)
        if own is not None:
            whole[own.start : own.start + own.values.numel()] = own.values
        self._attempt.check_peers()
        self._host_sum.add_up(whole)
        return whole


def _write_state(
    slices: list[tuple[OptimizerTensor, ParamSlice]], key: str, whole: torch.Tensor
) -> None:
    for optimizer_tensor, piece in slices:
        _write(optimizer_tensor.state[optimizer_tensor.tensor][key], piece, whole)


def _write(tensor: torch.Tensor, piece: ParamSlice, whole: torch.Tensor) -> None:
    values = whole[piece.start : piece.start + piece.length]
    with torch.no_grad():
        if tensor.dim() == 1:
            tensor[piece.offset : piece.offset + piece.length].copy_(values)
        else:  # a whole parameter, which may not be contiguous
            tensor.copy_(values.view(tensor.shape))


def _check_optimizer(engine: Any, snapshot: TrainingStateSnapshot) -> None:
    made, before = type(base_optimizer(engine.optimizer)), snapshot.optimizer
    if made is not before and not {made.__name__, before.__name__} <= ADAMS:
        raise ValueError(f"its optimizer is {made.__name__}, and was {before.__name__}")
    updated = [
        {name for name in members if snapshot.parameters[name].updated}
        for members in snapshot.members
    ]
    found = [
        {name for name in members if snapshot.parameters[name].updated}
        for members in group_members(engine)
    ]
    if found != updated:
        raise ValueError(
            f"its optimizer has {len(found)} parameter groups of {[*map(len, found)]} parameters, "
            f"and had {len(updated)} of {[*map(len, updated)]}"
        )


def _make_states(layout: list[OptimizerTensor], snapshot: TrainingStateSnapshot) -> None:
    """Create the states that an optimizer creates at its first update, as zeros."""
    for optimizer_tensor in layout:
        members = [snapshot.parameters[name] for name in optimizer_tensor.members]
        known = next((kept for kept in members if kept.states or kept.scalars), None)
        if known is None:
            continue  # no update was made yet
        own = optimizer_tensor.state.setdefault(optimizer_tensor.tensor, {})
        for key, dtype in known.states.items():
            if key not in own:
                own[key] = torch.zeros_like(
                    optimizer_tensor.tensor, dtype=dtype, requires_grad=False
                )
        for key, value in known.scalars.items():
            own[key] = copy.deepcopy(value)


def _update_partitions(optimizer: Any) -> None:
    """At stage 3 copy the master weights to this rank's partition of the model's own weights."""
    if hasattr(optimizer, "_reassign_or_swap_out_partitioned_parameters"):
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        optimizer.invalidate_secondary_tensor()


def _restore_options(optimizer: Any, snapshot: TrainingStateSnapshot) -> None:
    base = base_optimizer(optimizer)
    same = type(base) is snapshot.optimizer
    others = [getattr(optimizer, "backup_optimizer", None)]
    for each in [base, *(other for other in others if other is not None)]:
        for group, options in zip(each.param_groups, snapshot.options, strict=True):
            wanted = options if same and each is base else options.keys() & group.keys()
            group.update({key: copy.deepcopy(options[key]) for key in wanted})
    if not same:
        _convert_update_counts(base)


def _convert_update_counts(base: Any) -> None:
    """Convert Adam's update count to a number for DeepSpeed's own classes, else to a tensor."""
    as_number = type(base).__name__ in _DEEPSPEED_ADAMS
    for own in base.state.values():
        if "step" in own:
            step = float(own["step"])
            own["step"] = int(step) if as_number else torch.tensor(step, dtype=torch.float32)
