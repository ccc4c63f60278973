"""Describes which elements of which parameters are in a rank's shard of the optimizer.

A checkpoint holds this description beside DeepSpeed's files, which have flat tensors without names.
With it, the shards of all ranks can be read by another number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ....errors import CheckpointError
from ...engine.rebuild.optimizer_layout import OptimizerTensor, ParamSlice, layout_of
from ...engine.rebuild.state_snapshot import split_state
from .folder import first_line

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTensor:
    """Description of one tensor that the optimizer updates on the rank that wrote the checkpoint.

    Attributes:
        group: Index of the parameter group.
        numel: Number of elements, including padding.
        members: Names of the parameters that are flattened into the tensor, over all ranks.
        pieces: Name, first element in the parameter, number of elements, and offset in the tensor
            of each part of a parameter.
        states: Names of the optimizer states with one number per weight.
        scalars: Names of all other optimizer states.
    """

    __pydantic_config__: ClassVar = _STRICT

    group: NonNegativeInt
    numel: NonNegativeInt
    members: tuple[str, ...]
    pieces: tuple[tuple[str, NonNegativeInt, NonNegativeInt, NonNegativeInt], ...]
    states: tuple[str, ...]
    scalars: tuple[str, ...]


_LAYOUT = TypeAdapter(tuple[ShardTensor, ...])


def shard_layout(engine: Any) -> list[dict[str, Any]] | None:
    """Return the description of this rank's shard as plain data.

    Returns:
        None if each rank has the whole optimizer (ZeRO 0), or if the layout of this optimizer is
        unknown. An unknown layout can be loaded by the same number of ranks only.
    """
    if engine.zero_optimization_stage() == 0:
        return None
    try:
        return [_described(tensor) for tensor in layout_of(engine)]
    except (LookupError, ValueError):
        return None


def read_shard_layout(layout: Any) -> tuple[ShardTensor, ...]:
    """Return the descriptions in a checkpoint.

    Raises:
        CheckpointError: They are missing, or of another version of zerowatch.
    """
    if layout is None:
        raise CheckpointError(
            "it has no description of its shards, because it was written by an earlier version of "
            "zerowatch, or its optimizer is of an unknown kind. Load it with as many ranks as it "
            "was written with"
        )
    try:
        return _LAYOUT.validate_python(layout)
    except ValidationError as error:
        raise CheckpointError(
            f"the description of its shards is of another version of zerowatch "
            f"({first_line(error)}); load it with that version"
        ) from error


def shard_tensors(
    layout: Sequence[ShardTensor], state: Mapping[str, Any]
) -> tuple[OptimizerTensor, ...]:
    """Return the tensors of a shard, as they were in the optimizer that was saved.

    Args:
        layout: The descriptions.
        state: `optimizer_state_dict` of DeepSpeed's file of the shard.

    Raises:
        CheckpointError: The file lacks a tensor or a state of the description.
    """
    masters, base = _masters(state), _base_state(state).get("state", {})
    if len(masters) != len(layout):
        raise CheckpointError(
            f"a file of the optimizer has {len(masters)} tensors, and its description {len(layout)}"
        )
    # torch numbers the states by parameter group, and by position in the group.
    order = sorted(range(len(layout)), key=lambda number: layout[number].group)
    index = {number: position for position, number in enumerate(order)}
    return tuple(
        _tensor(described, masters[number], base.get(index[number], {}))
        for number, described in enumerate(layout)
    )


def group_options(state: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the options of each parameter group, such as its learning rate."""
    groups = _base_state(state)["param_groups"]
    return tuple(
        {key: value for key, value in group.items() if key != "params"} for group in groups
    )


def _described(tensor: OptimizerTensor) -> dict[str, Any]:
    states, scalars = split_state(tensor)
    return {
        "group": tensor.group,
        "numel": tensor.tensor.numel(),
        "members": tensor.members,
        "pieces": tuple((one.name, one.start, one.length, one.offset) for one in tensor.pieces),
        "states": tuple(states),
        "scalars": tuple(scalars),
    }


def _tensor(described: ShardTensor, master: Any, state: Mapping[str, Any]) -> OptimizerTensor:
    expected = {*described.states, *described.scalars}
    if state.keys() != expected:
        differing = ", ".join(sorted(expected.symmetric_difference(state)))
        raise CheckpointError(f"a file of the optimizer differs from its description: {differing}")
    needed = max((offset + length for _, _, length, offset in described.pieces), default=0)
    if any(one.numel() < needed for one in (master, *(state[name] for name in described.states))):
        raise CheckpointError("a tensor in a file of the optimizer is shorter than its description")
    return OptimizerTensor(
        tensor=master,
        # Padding of the master weights is not saved, and padding of the states is.
        state={master: {key: _cut(value, master, described, key) for key, value in state.items()}},
        group=described.group,
        members=described.members,
        pieces=tuple(
            ParamSlice(name=name, start=start, length=length, offset=offset)
            for name, start, length, offset in described.pieces
        ),
        replicated=False,
    )


def _cut(value: Any, master: Any, described: ShardTensor, key: str) -> Any:
    return value.reshape(-1)[: master.numel()] if key in described.states else value


def _masters(state: Mapping[str, Any]) -> Sequence[Any]:
    for key in ("single_partition_of_fp32_groups", "fp32_flat_groups"):
        if key in state:
            return list(state[key])
    raise CheckpointError("a file of the optimizer has no master weights that zerowatch can read")


def _base_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("base_optimizer_state", "optimizer_state_dict"):
        if isinstance(state.get(key), Mapping):
            found: Mapping[str, Any] = state[key]
            return found
    raise CheckpointError("a file of the optimizer has no optimizer state that zerowatch can read")
