"""Describes the master weights in each of DeepSpeed's optimizers as parts of named parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSlice:
    """Contiguous part of one flattened parameter.

    Attributes:
        name: Name of the parameter.
        start: Index of its first element in the parameter.
        length: Number of elements.
        offset: Index of the first element in the tensor that holds it.
    """

    name: str
    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerTensor:
    """Tensor that the base optimizer updates on this rank.

    Attributes:
        state: The optimizer's whole state, in which this tensor is a key.
        group: Index of the parameter group.
        members: Names of the parameters that are flattened into the tensor, over all ranks.
        pieces: Parts of these parameters on this rank.
        replicated: Whether the tensor is equal on all ranks.
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
    """Return the name of each parameter by its id(). A tied parameter has its first name."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def base_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer that a DeepSpeed optimizer wraps, or the optimizer itself."""
    return getattr(optimizer, "optimizer", optimizer)


def layout_of(engine: Any) -> Layout:
    """Return the tensors that this rank's optimizer updates.

    Raises:
        LookupError: The layout of this optimizer class is not known.
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
    """Return the parameter names of each group of the base optimizer, in its order.

    Frozen parameters are included only if DeepSpeed keeps them, as it does at stage 0 in fp32.
    """
    names = parameter_names(engine.module)
    groups = base_optimizer(engine.optimizer).param_groups
    if engine.optimizer is base_optimizer(engine.optimizer):
        return [tuple(names[id(each)] for each in group["params"]) for group in groups]
    members: list[tuple[str, ...]] = [() for _ in groups]
    for tensor in layout_of(engine):
        members[tensor.group] += tensor.members
    return members


def _plain(optimizer: Any, names: Names) -> Iterator[OptimizerTensor]:
    """Yield the tensors of stage 0 in fp32: the model's own parameters."""
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.numel():
                yield _whole(optimizer, index, parameter, names[id(parameter)])


def _unfused(optimizer: Any, names: Names) -> Iterator[OptimizerTensor]:
    """Yield the tensors of stage 0 in 16 bits: an fp32 copy of each parameter."""
    groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    for index, (parameters, masters) in enumerate(groups):
        for parameter, master in zip(parameters, masters, strict=True):
            yield _whole(optimizer.optimizer, index, master, names[id(parameter)])


def _fused(optimizer: Any, names: Names) -> Iterator[OptimizerTensor]:
    """Yield the tensors of stage 0 in 16 bits, fused: one fp32 copy for each parameter group."""
    groups = zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)
    for index, (parameters, flat) in enumerate(groups):
        yield _flat(optimizer, index, flat, _rows(parameters, names), (0, flat.numel()), True)


def _stage_1_and_2(optimizer: Any, names: Names) -> Iterator[OptimizerTensor]:
    """Yield the tensors of stages 1 and 2: this rank's partition of each parameter group."""
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
    """Yield the tensors of stage 1 in bf16 with fp32 gradients: a partition of each group."""
    for index, flat in enumerate(optimizer.fp32_groups_flat_partition):
        rank, size = dist.get_rank(optimizer.real_dp_process_group[index]), flat.numel()
        rows = _rows(optimizer.bf16_groups[index], names)
        yield _flat(optimizer, index, flat, rows, (rank * size, size), False)


def _stage_3(optimizer: Any, names: Names) -> Iterator[OptimizerTensor]:
    """Yield the tensors of stage 3: this rank's partitions of the parameters of each sub-group."""
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
    """Return the optimizer of a sub-group.

    With an offload ratio below 1, some sub-groups are updated on the device.
    """
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


def _rows(parameters: Sequence[torch.Tensor], names: Names) -> list[tuple[str, int, int]]:
    """Return name, offset and elements of parameters that are flattened one after the other."""
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
    span: tuple[int, int],
    replicated: bool,
) -> OptimizerTensor:
    """Describe this rank's part of a flattened parameter group.

    Args:
        optimizer: DeepSpeed's optimizer.
        group: Index of the group.
        flat: This rank's part.
        rows: Name, offset in the group and elements of each parameter.
        span: Offset and number of elements of this part in the group.
        replicated: Whether the tensor is equal on all ranks.
    """
    begin, size = span
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


def rank_partition(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the start and length of a rank's part of a tensor that is divided among all ranks."""
    part = math.ceil(length / world_size)
    start = min(part * rank, length)
    return start, min(part, length - start)
