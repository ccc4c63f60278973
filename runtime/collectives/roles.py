"""What a process group is for, by DeepSpeed's group registry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from deepspeed.utils import groups as registry

# Where DeepSpeed keeps its groups, by role. The first that holds a group names it: with plain data
# parallelism the registry's clone of the world group is the dp group.
_BY_ROLE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("tp", ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP")),
    ("ep", ("_EXPERT_PARALLEL_GROUP",)),
    (
        "dp",
        (
            "_EXPERT_DATA_PARALLEL_GROUP",
            "_DATA_PARALLEL_GROUP",
            "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
            "_WORLD_GROUP",
        ),
    ),
)


def role_of(group: dist.ProcessGroup) -> str:
    """Return dp, tp, pp, ep, sp, world or other."""
    if group is dist.group.WORLD:
        return "world"
    for role, names in _BY_ROLE:
        if any(group is known for name in names for known in _groups(getattr(registry, name))):
            return role
    if any(group is known for known in _of_mpu("get_pipe_parallel_group")):
        return "pp"
    if any(group is known for known in _of_mesh("sequence_parallel")):
        return "sp"
    dp_groups = (*_of_mesh("data_parallel"), *_of_mpu("get_data_parallel_group"))
    return "dp" if any(group is known for known in dp_groups) else "other"


def _groups(held: Any) -> Iterable[Any]:
    return held.values() if isinstance(held, dict) else (held,)


def _of_mpu(getter: str) -> Iterable[Any]:
    mpu = registry.mpu
    return (getattr(mpu, getter)(),) if hasattr(mpu, getter) else ()


def _of_mesh(dimension: str) -> Iterable[Any]:
    mesh = registry.mesh_device
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return (mesh.get_group(mesh_dim=dimension),) if mesh and dimension in names else ()
