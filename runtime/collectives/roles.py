"""What a process group is for, by the places where DeepSpeed and its callers keep their groups."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from deepspeed.utils import groups as registry

# Groups are told apart by identity: those of several roles may well have the same ranks. The first
# role that holds a group names it. Each line: the role, then where DeepSpeed's registry, an `mpu`
# (its own pipeline grid, its sequence parallel state, Megatron's) and its device mesh hold it.
_PLACES: tuple[tuple[str, tuple[str, ...], tuple[str, ...], str | None], ...] = (
    (
        "tp",
        ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP"),
        ("get_tensor_model_parallel_group", "get_slice_parallel_group"),
        None,
    ),
    ("ep", ("_EXPERT_PARALLEL_GROUP",), ("get_expert_model_parallel_group",), None),
    (
        "sp",
        (),
        ("get_sequence_parallel_group", "get_context_parallel_group"),
        "sequence_parallel",
    ),
    ("pp", (), ("get_pipe_parallel_group", "get_pipeline_model_parallel_group"), None),
    (
        "dp",
        (
            "_EXPERT_DATA_PARALLEL_GROUP",
            "_DATA_PARALLEL_GROUP",
            "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
            "_ALL_TO_ALL_GROUP",
            "_WORLD_GROUP",  # DeepSpeed's clone of the world group, for plain data parallelism
        ),
        ("get_data_parallel_group", "get_sequence_data_parallel_group"),
        "data_parallel",
    ),
)
_SEQUENCE_STATE = "deepspeed.runtime.sequence_parallel.parallel_state_sp"


def role_of(group: dist.ProcessGroup) -> str:
    """Return dp, tp, pp, ep, sp, world or other.

    torch's device mesh takes the world group itself for a dimension of all ranks. Then it has that
    dimension's role, whoever uses it.
    """
    for role, names, getters, dimension in _PLACES:
        for known in _kept(names, getters, dimension):
            if group is known:
                return role
    if group is dist.group.WORLD:
        return "world"
    return _role_in_model(group)


def p2p_role(group: dist.ProcessGroup) -> str:
    """Return what messages between two members of a group are for.

    DeepSpeed's pipeline sends between its stages over the world group.
    """
    stages = _asked(registry.mpu, "get_pipe_parallel_group")
    is_pipeline = stages is not None and stages.size() > 1
    return "pp" if is_pipeline and group is dist.group.WORLD else role_of(group)


def _kept(names: tuple[str, ...], getters: tuple[str, ...], dimension: str | None) -> Iterator[Any]:
    for name in names:
        held = getattr(registry, name, None)
        yield from held.values() if isinstance(held, dict) else (held,)
    for mpu in _mpus():
        for getter in getters:
            yield _asked(mpu, getter)
    mesh = registry.mesh_device
    if mesh is not None and dimension in (mesh.mesh_dim_names or ()):
        yield mesh.get_group(mesh_dim=dimension)


def _mpus() -> Iterable[Any]:
    return (registry.mpu, sys.modules.get(_SEQUENCE_STATE))


def _asked(mpu: Any, getter: str) -> Any:
    """Ask an mpu for a group; None if it has none of that kind."""
    if not hasattr(mpu, getter):
        return None
    try:
        return getattr(mpu, getter)()
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError):
        return None  # not initialised, which each says in its own way


def _role_in_model(group: dist.ProcessGroup) -> str:
    """Name a group that holds parts of one copy of the model, such as those of tied weights.

    An mpu's model parallel group spans stages and tensor slices; it is named after the stages.
    """
    stages = _asked(registry.mpu, "get_pipe_parallel_group")
    stages = stages or _asked(registry.mpu, "get_pipeline_model_parallel_group")
    is_model = group is _asked(registry.mpu, "get_model_parallel_group")
    if stages is None or stages.size() == 1:
        return "tp" if is_model else "other"
    within = set(dist.get_process_group_ranks(group)) <= set(dist.get_process_group_ranks(stages))
    return "pp" if is_model or within else "other"
