"""Copies an engine's training state to the host, and restores it in another engine.

Each rank copies its part of every parameter. The restore assembles the parts parameter by
parameter.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupLR

from ...common.collective_attempt import CollectiveAttempt
from ...common.host_group import new_host_group
from .optimizer_layout import (
    OptimizerTensor,
    ParamSlice,
    base_optimizer,
    group_members,
    layout_of,
    rank_partition,
)

# Names of the states in which torch-like optimizers count their updates. For a parameter of one
# element, only the name distinguishes the count from a state with one number per weight.
_UPDATE_COUNTS = ("step",)
_SCHEDULES = (LRRangeTest, OneCycle, WarmupCosineLR, WarmupLR)
_COUNTS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
# State of a dynamic loss scale; two classes have most of these in common.
SCALE_NAMES = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_OVERRIDES = ("custom_loss_scaler", "external_loss_scale")
# A new engine's optimizer may be of another class, such as DeepSpeed's own on the host. Its update
# count is then a number or a tensor.
_DEEPSPEED_ADAMS = ("DeepSpeedCPUAdam", "FusedAdam")
ADAMS = frozenset({*_DEEPSPEED_ADAMS, "Adam", "AdamW"})
# These optimizers have one update count for all tensors of a group. They keep the count in the last
# tensor with a gradient, and do not update the counts of the other tensors.
_COUNTING_IN_LAST_TENSOR = ("FusedAdam", "FusedLion")


@dataclass(frozen=True, slots=True)
class HostSlice:
    """Copy in host memory of the elements of a flattened parameter from index `start` on."""

    start: int
    values: torch.Tensor


@dataclass(slots=True, kw_only=True)
class ParamSnapshot:
    """Training state of one parameter.

    Attributes:
        updated: Whether the optimizer updates it.
        master: This rank's part of the master weights, or of the weights themselves if the
            parameter is not updated; None if this rank has no part.
        states: Dtype of each optimizer state with one number per weight.
        parts: This rank's parts of these states.
        scalars: All other optimizer states.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    updated: bool = False
    master: HostSlice | None = None
    master_dtype: torch.dtype = torch.float32
    states: dict[str, torch.dtype] = field(default_factory=dict)
    parts: dict[str, HostSlice] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """Counters of an engine, and the states of its LR scheduler and loss scalers.

    Attributes:
        schedule_rates: Rates of all groups that a schedule of DeepSpeed has taken from its
            optimizer when it was made, by attribute. Its state dict lacks them.
    """

    counts: Mapping[str, int]
    scheduler: Mapping[str, Any] | None
    schedule_rates: Mapping[str, list[Any]]
    scale: Mapping[str, Any]
    overrides: Mapping[str, Any]
    autocast_scale: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStateSnapshot:
    """Training state that a new engine needs to continue.

    Attributes:
        options: Options of each parameter group of the optimizer, such as its learning rate.
        members: Names of the parameters of each group.
        optimizer: Class of the base optimizer.
    """

    parameters: Mapping[str, ParamSnapshot]
    options: tuple[Mapping[str, Any], ...]
    members: tuple[tuple[str, ...], ...]
    optimizer: type
    counters: EngineCounters

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that the snapshot takes on this rank."""
        return sum(one.values.nbytes for kept in self.parameters.values() for one in _slices(kept))


def _slices(kept: ParamSnapshot) -> Iterator[HostSlice]:
    if kept.master is not None:
        yield kept.master
    yield from kept.parts.values()


def needed_host_bytes(engine: Any, world_size: int) -> int:
    """Return the host memory that a rank needs to copy the state, and to restore it, in bytes.

    The restore assembles one parameter at a time, so the largest one is added.

    Raises:
        ValueError: The optimizer has a state that is neither one number per weight nor a scalar.
    """
    copied, largest, updated = 0, 0, set[str]()
    for tensor in layout_of(engine):
        parts = world_size if tensor.replicated else 1
        length = sum(math.ceil(piece.length / parts) for piece in tensor.pieces)
        states, _ = split_state(tensor)
        copied += length * sum(each.element_size() for each in (tensor.tensor, *states.values()))
        updated.update(tensor.members)
    for name, parameter in engine.module.named_parameters():
        num_elements = _describe(parameter).shape.numel()
        largest = max(largest, num_elements * torch.float32.itemsize)
        if name not in updated:
            copied += math.ceil(num_elements / world_size) * parameter.element_size()
    return copied + largest


def take_snapshot(engine: Any, rank: int, world_size: int) -> TrainingStateSnapshot:
    """Copy an engine's training state to the host, without communication between the ranks.

    Raises:
        LookupError: The optimizer is of an unknown kind.
        ValueError: The optimizer has a state that is neither one number per weight nor a scalar.
    """
    parameters = describe_parameters(engine.module)
    groups = engine.optimizer.param_groups
    for tensor in layout_of(engine):
        copy_updated(tensor, parameters, rank, world_size)
    _copy_weights(engine.module, parameters, rank, world_size)
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return TrainingStateSnapshot(
        parameters=parameters,
        options=tuple(
            copy.deepcopy({key: value for key, value in group.items() if key != "params"})
            for group in groups
        ),
        members=tuple(group_members(engine)),
        optimizer=type(base),
        counters=copy_counters(engine),
    )


def describe_parameters(module: torch.nn.Module) -> dict[str, ParamSnapshot]:
    """Return the snapshots of a module's parameters by name, without any values."""
    return {name: _describe(parameter) for name, parameter in module.named_parameters()}


def _describe(parameter: Any) -> ParamSnapshot:
    shape = torch.Size(getattr(parameter, "ds_shape", parameter.shape))
    partitioned = hasattr(parameter, "ds_shape")
    return ParamSnapshot(
        shape=shape,
        stride=torch.empty(shape, device="meta").stride() if partitioned else parameter.stride(),
        dtype=parameter.dtype,
        device=parameter.device,
    )


def copy_updated(
    holder: OptimizerTensor,
    parameters: Mapping[str, ParamSnapshot],
    rank: int,
    world_size: int,
) -> None:
    """Copy this rank's parts of the parameters in an optimizer's tensor into their snapshots.

    Raises:
        KeyError: The tensor has a parameter that is not in `parameters`.
        ValueError: The optimizer has a state that is neither one number per weight nor a scalar.
    """
    tensors, scalars = split_state(holder)
    for name in holder.members:
        kept = parameters[name]
        kept.updated = True
        kept.master_dtype = holder.tensor.dtype
        kept.states = {key: tensor.dtype for key, tensor in tensors.items()}
        kept.scalars = copy.deepcopy(scalars)
    for piece in holder.pieces:
        kept, own = parameters[piece.name], piece
        if holder.replicated:
            own = _part(piece, rank, world_size)
        if own.length:
            kept.master = _copy(holder.tensor, own)
            kept.parts = {key: _copy(tensor, own) for key, tensor in tensors.items()}


def split_state(
    holder: OptimizerTensor,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensor's states with one number per weight, and its other optimizer states.

    Raises:
        ValueError: A state cannot be split along the weights, because it has another size.
    """
    tensors, scalars = {}, {}
    for key, value in holder.state.get(holder.tensor, {}).items():
        if not torch.is_tensor(value) or key in _UPDATE_COUNTS:
            scalars[key] = value
        elif value.shape == holder.tensor.shape:
            tensors[key] = value
        elif value.numel() <= 1:
            scalars[key] = value
        else:
            raise ValueError(
                f"its state {key!r} has the shape {tuple(value.shape)} for weights of "
                f"{tuple(holder.tensor.shape)}; only states with one number per weight can be moved"
            )
    return tensors, scalars


def _copy_weights(
    module: torch.nn.Module, parameters: Mapping[str, ParamSnapshot], rank: int, world_size: int
) -> None:
    """Copy the weights that no optimizer updates, in their own precision."""
    for name, parameter in module.named_parameters():
        kept = parameters[name]
        if kept.updated:
            continue
        kept.master_dtype = kept.dtype
        partition = getattr(parameter, "ds_tensor", None)
        if partition is None:
            start, length = rank_partition(parameter.numel(), rank, world_size)
            piece = ParamSlice(name=name, start=start, length=length, offset=start)
            kept.master = _copy(parameter, piece) if length else None
        else:
            start = partition.ds_numel * rank
            length = min(partition.ds_numel, kept.shape.numel() - start)
            piece = ParamSlice(name=name, start=start, length=length, offset=0)
            kept.master = _copy(partition, piece) if length > 0 else None


def _part(piece: ParamSlice, rank: int, world_size: int) -> ParamSlice:
    start, length = rank_partition(piece.length, rank, world_size)
    return ParamSlice(
        name=piece.name,
        start=piece.start + start,
        length=length,
        offset=piece.offset + start,
    )


def _copy(tensor: torch.Tensor, piece: ParamSlice) -> HostSlice:
    flat = tensor.detach().reshape(-1)
    values = flat[piece.offset : piece.offset + piece.length]
    return HostSlice(piece.start, values.to("cpu", copy=True))


def unequal_members(snapshot: TrainingStateSnapshot) -> str | None:
    """Return a parameter whose number of updates differs from its group's; None if all agree.

    The optimizer has only one update count for all weights that are flattened together.
    """
    if _counts_in_last_tensor(snapshot):
        return None
    for members in snapshot.members:
        counted = [
            (name, snapshot.parameters[name].scalars)
            for name in members
            if snapshot.parameters[name].scalars
        ]
        for name, scalars in counted[1:]:
            if _comparable(scalars) != _comparable(counted[0][1]):
                return name
    return None


def _counts_in_last_tensor(snapshot: TrainingStateSnapshot) -> bool:
    return snapshot.optimizer.__name__ in _COUNTING_IN_LAST_TENSOR


def _comparable(scalars: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.tolist() if torch.is_tensor(value) else value for key, value in scalars.items()
    }


def copy_counters(engine: Any) -> EngineCounters:
    """Copy the counters of an engine."""
    scheduler, scaler = engine.lr_scheduler, autocast_scaler(engine)
    return EngineCounters(
        counts={name: getattr(engine, name) for name in _COUNTS},
        scheduler=None if scheduler is None else copy.deepcopy(scheduler.state_dict()),
        schedule_rates=_schedule_rates(scheduler),
        scale=_present(_loss_scaler(engine.optimizer), SCALE_NAMES),
        overrides=_present(engine.optimizer, _OVERRIDES),
        autocast_scale=None if scaler is None else copy.deepcopy(scaler.state_dict()),
    )


def restore_counters(counters: EngineCounters, engine: Any) -> None:
    """Restore copied counters on an engine."""
    for name, value in counters.counts.items():
        setattr(engine, name, value)
    if counters.scheduler is not None and engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(copy.deepcopy(dict(counters.scheduler)))
        vars(engine.lr_scheduler).update(copy.deepcopy(dict(counters.schedule_rates)))
    _set_present(_loss_scaler(engine.optimizer), counters.scale)
    _set_present(engine.optimizer, counters.overrides)
    scaler = autocast_scaler(engine)
    if counters.autocast_scale is not None and scaler is not None:
        scaler.load_state_dict(dict(counters.autocast_scale))


def _schedule_rates(scheduler: Any) -> dict[str, list[Any]]:
    """Return the lists of a schedule of DeepSpeed, with one value per group.

    A schedule that is made in the middle of training would scale the rates of that step.
    """
    if not isinstance(scheduler, _SCHEDULES):
        return {}
    return {
        name: copy.deepcopy(value)
        for name, value in vars(scheduler).items()
        if isinstance(value, list)
    }


def _loss_scaler(optimizer: Any) -> Any:
    """Return the holder of fp16's dynamic loss scale; None if the scale is static or absent."""
    scaler = getattr(optimizer, "loss_scaler", getattr(optimizer, "loss_scale_config", None))
    dynamic = getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False))
    return scaler if dynamic else None


def autocast_scaler(engine: Any) -> Any:
    """Return the GradScaler of `torch_autocast` with float16; None if there is none."""
    own = getattr(engine, "torch_autocast_z0_gradscaler", None)
    return own or getattr(engine.optimizer, "torch_autocast_gradscaler", None)


def _present(owner: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in names if hasattr(owner, name)}


def _set_present(owner: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if hasattr(owner, name):
            setattr(owner, name, value)


def restore_snapshot(
    engine: Any, snapshot: TrainingStateSnapshot, host_sum: HostSum, attempt: CollectiveAttempt
) -> None:
    """Restore all training state in an engine. All ranks must call it at the same time.

    Raises:
        ValueError: The optimizer's parameters or states differ from those of the old optimizer.
        PeerAttemptError: Another rank has failed.
    """
    layout = layout_of(engine)
    _check_optimizer(engine, layout, snapshot)
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

    The sums use a gloo group of their own, so that they do not wait for a device queue.
    """

    def __init__(self, world_size: int) -> None:
        self._group = new_host_group() if world_size > 1 else None

    def add_up(self, parts: torch.Tensor) -> None:
        """Sum a tensor in place, bit for bit. At most one rank has a nonzero value per element."""
        if self._group is not None:
            # Sum the bits as integers, because adding 0.0 to -0.0 would give 0.0.
            dtype = {4: torch.int32, 8: torch.int64}.get(parts.element_size(), torch.uint8)
            dist.all_reduce(parts.view(dtype), group=self._group)

    def close(self) -> None:
        """Destroy the group. Safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


class _StateRestorer:
    """Assembles parameters from the ranks' parts, and writes them to the new engine."""

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
        whole = torch.zeros(kept.shape.numel(), dtype=dtype, device="cpu")
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


def _check_optimizer(
    engine: Any, layout: list[OptimizerTensor], snapshot: TrainingStateSnapshot
) -> None:
    new_type, old_type = type(base_optimizer(engine.optimizer)), snapshot.optimizer
    if new_type is not old_type and not {new_type.__name__, old_type.__name__} <= ADAMS:
        raise ValueError(f"its optimizer is {new_type.__name__}, and was {old_type.__name__}")
    for tensor in layout:
        for name in tensor.members:
            if not snapshot.parameters[name].updated:
                raise ValueError(f"its optimizer updates {name}, and did not before")
    updated = [
        {name for name in members if snapshot.parameters[name].updated}
        for members in snapshot.members
    ]
    actual = [
        {name for name in members if snapshot.parameters[name].updated}
        for members in group_members(engine)
    ]
    if actual != updated:
        raise ValueError(
            f"its optimizer has {len(actual)} groups of {[*map(len, actual)]} parameters, "
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
        for key, value in _scalars(optimizer_tensor, known, snapshot).items():
            own[key] = copy.deepcopy(value)


def _scalars(
    optimizer_tensor: OptimizerTensor, known: ParamSnapshot, snapshot: TrainingStateSnapshot
) -> Mapping[str, Any]:
    """Return the scalar states of a tensor; `known` is a parameter in the tensor with states."""
    is_whole_parameter = optimizer_tensor.replicated and len(optimizer_tensor.members) == 1
    if is_whole_parameter or not _counts_in_last_tensor(snapshot):
        return known.scalars
    group = [snapshot.parameters[name] for name in snapshot.members[optimizer_tensor.group]]
    counts = {
        name: max(kept.scalars[name] for kept in group if name in kept.scalars)
        for name in _UPDATE_COUNTS
        if name in known.scalars
    }
    return {**known.scalars, **counts}


def _update_partitions(optimizer: Any) -> None:
    """Copy the master weights to this rank's partition of the model's own weights, at stage 3."""
    if hasattr(optimizer, "_reassign_or_swap_out_partitioned_parameters"):
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        optimizer.invalidate_secondary_tensor()


def _restore_options(optimizer: Any, snapshot: TrainingStateSnapshot) -> None:
    base = base_optimizer(optimizer)
    same = type(base) is snapshot.optimizer
    others = [getattr(optimizer, "backup_optimizer", None)]
    for torch_optimizer in [base, *(other for other in others if other is not None)]:
        for group, options in zip(torch_optimizer.param_groups, snapshot.options, strict=True):
            wanted = options if same and torch_optimizer is base else options.keys() & group.keys()
            group.update({key: copy.deepcopy(options[key]) for key in wanted})
    if not same:
        _convert_update_counts(base)


def _convert_update_counts(base: Any) -> None:
    """Convert Adam's update count: to a number for DeepSpeed's own classes, else to a tensor."""
    as_number = type(base).__name__ in _DEEPSPEED_ADAMS
    for own in base.state.values():
        if "step" in own:
            step = float(own["step"])
            as_tensor = torch.tensor(step, dtype=torch.float32, device="cpu")
            own["step"] = int(step) if as_number else as_tensor
