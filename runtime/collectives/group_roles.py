"""Finds the role of a process group, such as dp, where DeepSpeed and Megatron keep their groups."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch.distributed as dist

from ...metrics.catalog.labels import OWN_GROUP
from ..common.host_group import GROUP_DESCRIPTION
from ..common.torch_engine import TorchEngine
from .groups import Groups


class _RoleHolders(NamedTuple):
    """The attributes and functions that hold the groups of one role."""

    role: str
    registry: tuple[str, ...] = ()  # attributes of deepspeed.utils.groups
    mpu: tuple[str, ...] = ()  # getters of an mpu: DeepSpeed's pipeline grid, Megatron's
    mesh_dimension: str | None = None  # of DeepSpeed's device mesh


# Groups are compared by identity, because groups of different roles may have the same ranks. If
# several roles hold a group, the first of these roles is used.
_ROLES = (
    _RoleHolders(
        role="tp",
        registry=("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP"),
        mpu=("get_tensor_model_parallel_group", "get_slice_parallel_group"),
    ),
    _RoleHolders(
        role="ep",
        registry=("_EXPERT_PARALLEL_GROUP",),
        mpu=("get_expert_model_parallel_group",),
    ),
    _RoleHolders(
        role="sp",
        mpu=("get_sequence_parallel_group", "get_context_parallel_group"),
        mesh_dimension="sequence_parallel",
    ),
    _RoleHolders(
        role="pp",
        mpu=("get_pipe_parallel_group", "get_pipeline_model_parallel_group"),
    ),
    _RoleHolders(
        role="dp",
        registry=(
            "_EXPERT_DATA_PARALLEL_GROUP",
            "_DATA_PARALLEL_GROUP",
            "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
            "_ALL_TO_ALL_GROUP",
            "_WORLD_GROUP",  # DeepSpeed's clone of the world group, for plain data parallelism
        ),
        mpu=("get_data_parallel_group", "get_sequence_data_parallel_group"),
        mesh_dimension="data_parallel",
    ),
)
_REGISTRY = "deepspeed.utils.groups"
_NO_REGISTRY = SimpleNamespace(mpu=None, mesh_device=None)
_SEQUENCE_STATE = "deepspeed.runtime.sequence_parallel.parallel_state_sp"


def set_roles(groups: Groups, engine: Any) -> None:
    """Set how the roles of groups are found: by DeepSpeed's registry, or by a torch model."""
    if not isinstance(engine, TorchEngine):
        groups.set_roles(role_of, p2p_role)
        return
    roles = {id(group): role for group, role in engine.group_roles() if role != "other"}

    def torch_role(group: dist.ProcessGroup) -> str:
        own = role_of(group)
        return own if own == OWN_GROUP else roles.get(id(group), own)

    groups.set_roles(torch_role, torch_role)


def role_of(group: dist.ProcessGroup) -> str:
    """Return dp, tp, pp, ep, sp, world, zerowatch or other.

    If a dimension of torch's device mesh contains all ranks, the mesh uses the world group itself
    for this dimension. The world group then has the role of the dimension, for every caller.
    """
    if group.group_desc == GROUP_DESCRIPTION:
        return OWN_GROUP
    for holders in _ROLES:
        for held in _groups_held(holders):
            if group is held:
                return holders.role
    if group is dist.group.WORLD:
        return "world"
    return _role_in_model(group)


def p2p_role(group: dist.ProcessGroup) -> str:
    """Return the role of messages between two members of a group.

    DeepSpeed's pipeline sends between its stages over the world group.
    """
    stages = _group_from(_registry().mpu, "get_pipe_parallel_group")
    is_pipeline = stages is not None and stages.size() > 1
    return "pp" if is_pipeline and group is dist.group.WORLD else role_of(group)


def _groups_held(holders: _RoleHolders) -> Iterator[Any]:
    for name in holders.registry:
        held = getattr(_registry(), name, None)
        yield from held.values() if isinstance(held, dict) else (held,)
    for mpu in _mpus():
        for getter in holders.mpu:
            yield _group_from(mpu, getter)
    mesh = _registry().mesh_device
    if mesh is not None and holders.mesh_dimension in (mesh.mesh_dim_names or ()):
        yield mesh.get_group(mesh_dim=holders.mesh_dimension)


def _mpus() -> Iterable[Any]:
    return (_registry().mpu, sys.modules.get(_SEQUENCE_STATE))


def _registry() -> Any:
    """Return DeepSpeed's registry of groups; one without groups if DeepSpeed is not imported."""
    return sys.modules.get(_REGISTRY, _NO_REGISTRY)


def _group_from(mpu: Any, getter: str) -> Any:
    """Return the group from an mpu's getter; None if the mpu does not have the group."""
    if not hasattr(mpu, getter):
        return None
    try:
        return getattr(mpu, getter)()
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError):
        return None  # the group is not initialized; each mpu raises a different error


def _role_in_model(group: dist.ProcessGroup) -> str:
    """Return the role of a group within one copy of the model, such as a group of tied weights.

    The model parallel group of an mpu spans pipeline stages and tensor slices. Its role is pp if
    there are several stages.
    """
    stages = _group_from(_registry().mpu, "get_pipe_parallel_group")
    stages = stages or _group_from(_registry().mpu, "get_pipeline_model_parallel_group")
    is_model = group is _group_from(_registry().mpu, "get_model_parallel_group")
    if stages is None or stages.size() == 1:
        return "tp" if is_model else "other"
    within = set(dist.get_process_group_ranks(group)) <= set(dist.get_process_group_ranks(stages))
    return "pp" if is_model or within else "other"
