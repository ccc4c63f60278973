"""Which tensors an engine's optimizer updates, and which parts of which parameters lie in them.

The only file that knows how each of DeepSpeed's optimizers lays out its master weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSlice:
    """A stretch of one flattened parameter: `length` elements from `start` on.

    `offset` is where it begins in the tensor that holds it.
    """

    name: str
    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerTensor:
    """A tensor that the base optimizer updates on this rank.

    `members` names the parameters that share it on any rank, `pieces` says what this rank has of
    them; `state` is the optimizer's whole state, in which this tensor is a key; `group` is the
    index of its parameter group. A `replicated` one is the same on all ranks.
    """

    tensor: torch.Tensor
    state: MutableMapping[Any, dict[str, Any]]
    group: int
    members: tuple[str, ...]
    pieces: tuple[ParamSlice, ...]
    replicated: bool


Names = Mapping[int, str]
Layout = list[OptimizerTensor]


def parameter_names(module: torch.nn.Module) -> dict[int, str]:
    """Return by id the name of each parameter; of a tied one the first."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def base_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer within one of DeepSpeed's, or the optimizer itself."""
    return getattr(optimizer, "optimizer", optimizer)


def layout_of(engine: Any) -> Layout:
    """Return what this rank's optimizer updates.

    Raises:
        LookupError: It is an optimizer of a kind that is not known here.
    """
    optimizer = engine.optimizer
    names = parameter_names(engine.module)
    make = _LAYOUTS.get(type(optimizer).__name__)
    if make is None and isinstance(optimizer, torch.optim.Optimizer):
        make = _plain
    if make is None:
        raise LookupError(type(optimizer).__name__)
    return list(make(optimizer, names))


def group_members(engine: Any) -> list[tuple[str, ...]]:
    """Name the parameters of each group of the base optimizer, in its order.

    Frozen ones are there only where DeepSpeed has kept them, at stage 0 in fp32.
    """
    names = parameter_names(engine.module)
    groups = base_optimizer(engine.optimizer).param_groups
    if engine.optimizer is base_optimizer(engine.optimizer):
        return [tuple(names[id(each)] for each in group["params"]) for group in groups]
    members: list[tuple[str, ...]] = [() for _ in groups]
    for holder in layout_of(engine):
        members[holder.group] += holder.members
    return members


def _plain(optimizer: Any, names: Names) -> Iterator[OptimizerTensor]:
    """Stage 0 in fp32: the model's own parameters."""
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.numel():
                yield _whole(optimizer, index, parameter, names[id(parameter)])


def _unfused(optimizer: Any, names: Names) -> Iterator[OptimizerTensor]:
    """Stage 0 in 16 bits: an fp32 copy of each parameter."""
    groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    for index, (parameters, masters) in enumerate(groups):
        for parameter, master in zip(parameters, masters, strict=True):
            yield _whole(optimizer.optimizer, index, master, names[id(parameter)])


def _fused(optimizer: Any, names: Names) -> Iterator[OptimizerTensor]:
    """Stage 0 in 16 bits with a fused optimizer: one fp32 copy for each group."""
    groups = zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)
    for index, (parameters, flat) in enumerate(groups):
        yield _flat(optimizer, index, flat, _in_a_row(parameters, names), (0, flat.numel()), True)


def _stage_1_and_2(optimizer: Any, names: Names) -> Iterator[OptimizerTensor]:
    for index, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        rank = dist.get_rank(optimizer.real_dp_process_group[index])
        size = int(optimizer.partition_size[index])
        rows = [
            (names[id(parameter)], int(offset), parameter.numel())
            for parameter, offset in zip(
                optimizer.round_robin_bit16_groups[index],
                optimizer.round_robin_bit16_offsets[index],
                strict=True,
            )
        ]
        yield _flat(optimizer, index, flat, rows, (rank * size, size), False)


def _bf16(optimizer: Any, names: Names) -> Iterator[OptimizerTensor]:
    """Stage 1 in bf16 with gradients in fp32."""
    for index, flat in enumerate(optimizer.fp32_groups_flat_partition):
        rank, size = dist.get_rank(optimizer.real_dp_process_group[index]), flat.numel()
        rows = _in_a_row(optimizer.bf16_groups[index], names)
        yield _flat(optimizer, index, flat, rows, (rank * size, size), False)


def _stage_3(optimizer: Any, names: Names) -> Iterator[OptimizerTensor]:
    for number, parameters in enumerate(optimizer.fp16_groups):
        pieces, offset = [], 0
        for parameter in parameters:
            size = parameter.partition_numel()
            start = size * optimizer._get_param_partition_rank(parameter)
            length = min(size, parameter.ds_numel - start)
            if length > 0:
                name = names[id(parameter)]
                pieces.append(ParamSlice(name=name, start=start, length=length, offset=offset))
            offset += size
        yield OptimizerTensor(
            tensor=optimizer.fp32_partitioned_groups_flat[number],
            state=_stage_3_optimizer(optimizer, number).state,
            group=optimizer.sub_group_to_group_id[number],
            members=tuple(names[id(parameter)] for parameter in parameters),
            pieces=tuple(pieces),
            replicated=False,
        )


def _stage_3_optimizer(optimizer: Any, number: int) -> Any:
    """Return what updates a sub-group: with a ratio under 1 some stay on the device."""
    devices = getattr(optimizer, "subgroup_to_device", None)
    on_host = devices is None or devices[number] == "cpu"
    return optimizer.optimizer if on_host else optimizer.backup_optimizer


_LAYOUTS: Mapping[str, Callable[[Any, Names], Iterator[OptimizerTensor]]] = {
    "FP16_UnfusedOptimizer": _unfused,
    "FP16_Optimizer": _fused,
    "DeepSpeedZeroOptimizer": _stage_1_and_2,
    "BF16_Optimizer": _bf16,
    "DeepSpeedZeroOptimizer_Stage3": _stage_3,
}


def _whole(base: Any, group: int, tensor: torch.Tensor, name: str) -> OptimizerTensor:
    piece = ParamSlice(name=name, start=0, length=tensor.numel(), offset=0)
    return OptimizerTensor(
        tensor=tensor,
        state=base.state,
        group=group,
        members=(name,),
        pieces=(piece,),
        replicated=True,
    )


def _in_a_row(parameters: Sequence[torch.Tensor], names: Names) -> list[tuple[str, int, int]]:
    rows, offset = [], 0
    for parameter in parameters:
        rows.append((names[id(parameter)], offset, parameter.numel()))
        offset += parameter.numel()
    return rows


def _flat(
    optimizer: Any,
    group: int,
    flat: torch.Tensor,
    rows: Sequence[tuple[str, int, int]],
    window: tuple[int, int],
    replicated: bool,
) -> OptimizerTensor:
    """Describe the stretch of a flattened group that lies on this rank.

    Args:
        optimizer: DeepSpeed's.
        group: Its index.
        flat: This rank's stretch.
        rows: Name, offset in the group and elements of each parameter.
        window: Offset and elements of the stretch.
        replicated: Whether all ranks have the same.
    """
    begin, size = window
    pieces = []
    for name, offset, numel in rows:
        first, last = max(offset, begin), min(offset + numel, begin + size)
        if first < last:
            piece = ParamSlice(
                name=name, start=first - offset, length=last - first, offset=first - begin
            )
            pieces.append(piece)
    return OptimizerTensor(
        tensor=flat,
        state=optimizer.optimizer.state,
        group=group,
        members=tuple(name for name, _, _ in rows),
        pieces=tuple(pieces),
        replicated=replicated,
    )


def rank_share(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return start and length of a rank's part of something that all ranks have."""
    part = math.ceil(length / world_size)
    start = min(part * rank, length)
    return start, min(part, length - start)
