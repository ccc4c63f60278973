"""The training state of an engine on the host, by parameter; of each one this rank's part only."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .engine_counters import EngineCounters, take_account
from .layout import OptimizerTensor, ParamSlice, group_members, layout_of, rank_share

# What a torch-like optimizer counts its updates in; in a parameter of one element nothing else
# tells it from a state of one number per weight.
_COUNTERS = ("step",)


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements of a flattened parameter from `start` on, on the host."""

    start: int
    values: torch.Tensor


@dataclass(slots=True, kw_only=True)
class ParamSnapshot:
    """One parameter.

    `master` is this rank's part of what the optimizer updates, or of the weights themselves where
    it does not, as in a frozen parameter; None where this rank has none of it. `states` has the
    dtype of each of the optimizer's states with one number per weight, `parts` this rank's parts of
    them; `scalars` are all other states.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    updated: bool = False
    master: Slice | None = None
    master_dtype: torch.dtype = torch.float32
    states: dict[str, torch.dtype] = field(default_factory=dict)
    parts: dict[str, Slice] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStateSnapshot:
    """What a new engine needs to go on.

    `options` and `members` are those of the optimizer's parameter groups.
    """

    parameters: Mapping[str, ParamSnapshot]
    options: tuple[Mapping[str, Any], ...]
    members: tuple[tuple[str, ...], ...]
    optimizer: type
    account: EngineCounters

    @property
    def num_bytes(self) -> int:
        """Bytes on this rank's host."""
        return sum(one.values.nbytes for kept in self.parameters.values() for one in _slices(kept))


def _slices(kept: ParamSnapshot) -> Iterator[Slice]:
    if kept.master is not None:
        yield kept.master
    yield from kept.parts.values()


def take_snapshot(engine: Any, rank: int, world_size: int) -> TrainingStateSnapshot:
    """Copy an engine's training state to the host; changes nothing, and talks to no other rank.

    Raises:
        LookupError: The optimizer is of an unknown kind.
        ValueError: It keeps a state that is neither one number per weight nor one for all.
    """
    parameters = {
        name: _describe(parameter) for name, parameter in engine.module.named_parameters()
    }
    groups = engine.optimizer.param_groups
    for holder in layout_of(engine):
        _keep(holder, parameters, rank, world_size)
    _keep_weights(engine.module, parameters, rank, world_size)
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return TrainingStateSnapshot(
        parameters=parameters,
        options=tuple(
            copy.deepcopy({key: value for key, value in group.items() if key != "params"})
            for group in groups
        ),
        members=tuple(group_members(engine)),
        optimizer=type(base),
        account=take_account(engine),
    )


def _describe(parameter: Any) -> ParamSnapshot:
    shape = torch.Size(getattr(parameter, "ds_shape", parameter.shape))
    partitioned = hasattr(parameter, "ds_shape")
    return ParamSnapshot(
        shape=shape,
        stride=torch.empty(shape, device="meta").stride() if partitioned else parameter.stride(),
        dtype=parameter.dtype,
        device=parameter.device,
    )


def _keep(
    holder: OptimizerTensor, parameters: Mapping[str, ParamSnapshot], rank: int, world_size: int
) -> None:
    tensors, scalars = split_state(holder)
    for name in holder.members:
        kept = parameters[name]
        kept.updated = True
        kept.master_dtype = holder.tensor.dtype
        kept.states = {key: tensor.dtype for key, tensor in tensors.items()}
        kept.scalars = copy.deepcopy(scalars)
    for piece in holder.pieces:
        kept, cut = parameters[piece.name], piece
        if holder.replicated:
            cut = _part(piece, rank, world_size)
        if cut.length:
            kept.master = _copy(holder.tensor, cut)
            kept.parts = {key: _copy(tensor, cut) for key, tensor in tensors.items()}


def split_state(holder: OptimizerTensor) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return what the optimizer keeps of a tensor: one number per weight, and all else.

    Raises:
        ValueError: There is a state of another size, which cannot be cut along the weights.
    """
    tensors, scalars = {}, {}
    for key, value in holder.state.get(holder.tensor, {}).items():
        if not torch.is_tensor(value) or key in _COUNTERS:
            scalars[key] = value
        elif value.shape == holder.tensor.shape:
            tensors[key] = value
        elif value.numel() <= 1:
            scalars[key] = value
        else:
            raise ValueError(
                f"its state {key!r} has the shape {tuple(value.shape)} for weights of "
                f"{tuple(holder.tensor.shape)}; only states with one number per weight move"
            )
    return tensors, scalars


def _keep_weights(
    module: torch.nn.Module, parameters: Mapping[str, ParamSnapshot], rank: int, world_size: int
) -> None:
    """Keep the weights that no optimizer updates, in their own precision."""
    for name, parameter in module.named_parameters():
        kept = parameters[name]
        if kept.updated:
            continue
        kept.master_dtype = kept.dtype
        partition = getattr(parameter, "ds_tensor", None)
        if partition is None:
            start, length = rank_share(parameter.numel(), rank, world_size)
            piece = ParamSlice(name=name, start=start, length=length, offset=start)
            kept.master = _copy(parameter, piece) if length else None
        else:
            start = partition.ds_numel * rank
            length = min(partition.ds_numel, kept.shape.numel() - start)
            piece = ParamSlice(name=name, start=start, length=length, offset=0)
            kept.master = _copy(partition, piece) if length > 0 else None


def _part(piece: ParamSlice, rank: int, world_size: int) -> ParamSlice:
    start, length = rank_share(piece.length, rank, world_size)
    return ParamSlice(
        name=piece.name,
        start=piece.start + start,
        length=length,
        offset=piece.offset + start,
    )


def _copy(tensor: torch.Tensor, piece: ParamSlice) -> Slice:
    flat = tensor.detach().reshape(-1)
    values = flat[piece.offset : piece.offset + piece.length]
    return Slice(piece.start, values.to("cpu", copy=True))


def unequal_members(snapshot: TrainingStateSnapshot) -> str | None:
    """Name a parameter that has taken other steps than the rest of its group; None if none has.

    Where weights are flattened together they share what the optimizer counts.
    """
    for members in snapshot.members:
        counted = [
            (name, snapshot.parameters[name].scalars)
            for name in members
            if snapshot.parameters[name].scalars
        ]
        for name, scalars in counted[1:]:
            if _plain(scalars) != _plain(counted[0][1]):
                return name
    return None


def _plain(scalars: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.tolist() if torch.is_tensor(value) else value for key, value in scalars.items()
    }
