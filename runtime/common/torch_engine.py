"""Presents a torch model and its optimizer to monitoring, where there is no DeepSpeed engine.

The model may be wrapped by DistributedDataParallel or torch.compile, or sharded by FSDP2. Nothing
is written to the model: a script may copy or pickle it.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from . import accelerator

# The roles of the dimensions of a device mesh, by the names that torch's own examples give them.
_ROLE_OF_DIMENSION: Mapping[str, str] = {
    **dict.fromkeys(("dp", "ddp", "fsdp", "data", "data_parallel", "replicate", "shard"), "dp"),
    **dict.fromkeys(("dp_replicate", "dp_shard", "dp_shard_cp", "dp_cp", "hsdp"), "dp"),
    **dict.fromkeys(("tp", "tensor", "tensor_parallel", "model"), "tp"),
    **dict.fromkeys(("cp", "sp", "context", "sequence_parallel"), "sp"),
    **dict.fromkeys(("pp", "pipeline", "pipeline_parallel"), "pp"),
    **dict.fromkeys(("ep", "expert", "expert_parallel"), "ep"),
}
_MAX_WRAPPERS = 8

T = TypeVar("T")


class TorchEngine:
    """A model and its optimizer, with the attributes of a DeepSpeed engine that monitoring reads.

    It lives as long as the model, and refers to both weakly.

    Attributes:
        global_steps: Number of optimizer steps. After a resume it continues at the number that the
            optimizer's state has.
        skipped_steps: Always 0. A step that a GradScaler skips does not call the optimizer.
        config: No settings.
    """

    config: Mapping[str, Any] = {}
    skipped_steps = 0

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer)
        self._module = weakref.ref(unwrapped(model))
        self.global_steps = steps_so_far(optimizer)

    @property
    def model(self) -> nn.Module:
        """The model that the script calls, with its wrappers."""
        return _alive(self._model())

    @property
    def module(self) -> nn.Module:
        """The model without the wrappers of DDP and torch.compile."""
        return _alive(self._module())

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; None if the script has released it."""
        return self._optimizer()

    def fp16_enabled(self) -> bool:
        """Return False: the scale of a GradScaler is not read, because that waits for the GPU."""
        return False

    def is_deepcompile_active(self) -> bool:
        """Return False."""
        return False

    def get_global_grad_norm(self) -> None:
        """Return None: torch keeps no gradient norm."""

    def zero_optimization_stage(self) -> str:
        """Return the label that stands for a stage."""
        return "none"

    def group_roles(self) -> Iterator[tuple[dist.ProcessGroup, str]]:
        """Yield the process groups of DDP, of torch's pipeline stages, and of device meshes.

        These are the meshes on which parameters are sharded, and all dimensions with a usual name:
        context parallelism shards no parameters.
        """
        model = self.model
        if isinstance(model, DistributedDataParallel):
            yield model.process_group, "dp"
        for group in _groups_of_stages(model):
            yield group, "pp"
        for group in list(c10d._world.pg_map):
            origin, _, named = group.group_desc.partition("_")
            if origin == "mesh" and named in _ROLE_OF_DIMENSION:
                yield group, _ROLE_OF_DIMENSION[named]
        # To import torch.distributed.tensor imports sympy: 60 MiB, and a second. Where nobody has
        # imported it, no parameter is a DTensor.
        tensor = sys.modules.get("torch.distributed.tensor")
        if tensor is None:
            return
        meshes = {
            id(parameter.device_mesh): parameter.device_mesh
            for parameter in model.parameters()
            if isinstance(parameter, tensor.DTensor)
        }
        for mesh in meshes.values():
            for dimension in range(mesh.ndim):
                name = None if mesh.mesh_dim_names is None else mesh.mesh_dim_names[dimension]
                is_only = name is None and mesh.ndim == 1  # fully_shard's own mesh has no names
                role = "dp" if is_only else _ROLE_OF_DIMENSION.get(name or "", "other")
                yield mesh.get_group(dimension), role


def _groups_of_stages(model: nn.Module) -> list[dist.ProcessGroup]:
    """Return the process groups of torch's pipeline stages that have parameters of a model.

    Other stages may be left over from an earlier training. A stage without a group uses that of all
    ranks.
    """
    module = sys.modules.get("torch.distributed.pipelining.stage")
    base = getattr(module, "_PipelineStageBase", None)
    if base is None:
        return []
    own = {id(one) for one in model.parameters()}
    groups = []
    for stage in map(vars, _instances(base)):
        part: Any = stage.get("submod")
        group = stage.get("group")
        if _is_module(part) and any(id(one) in own for one in part.parameters()):
            groups.append(dist.group.WORLD if group is None else group)
    return [group for group in dict.fromkeys(groups) if group in c10d._world.pg_map]


def _instances(base: type) -> list[Any]:
    """Return the objects of a class and its subclasses.

    `gc.get_referrers` takes a tenth of the time of a loop over all objects, and runs no code of
    theirs, such as that of a metaclass.
    """
    kinds = [base]
    for kind in kinds:  # the list grows
        kinds += type.__subclasses__(kind)
    return [one for one in gc.get_referrers(*kinds) if any(type(one) is kind for kind in kinds)]


# The values live as long as the models, because a watch refers to an engine weakly.
_engines: weakref.WeakKeyDictionary[nn.Module, TorchEngine] = weakref.WeakKeyDictionary()


def torch_engine(model: nn.Module, optimizer: torch.optim.Optimizer) -> TorchEngine:
    """Return the engine of a model and its optimizer, the same one for the same two objects."""
    engine = _engines.get(model)
    if engine is None or engine.optimizer is not optimizer:
        engine = _engines[model] = TorchEngine(model, optimizer)
    return engine


def trains(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Whether an optimizer has a parameter of a model."""
    own = {id(one) for one in model.parameters()}
    return any(id(one) in own for group in optimizer.param_groups for one in group["params"])


def trained_model(optimizer: torch.optim.Optimizer) -> nn.Module | None:
    """Return the outermost module that holds the parameters of an optimizer; None without one.

    If several modules that no other module contains hold parameters, the one with the most of them
    is returned. This searches all objects of the process, which takes tenths of a second.
    """
    trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
    # `type` instead of isinstance: a lazy object must not be loaded by this search.
    modules = [each for each in gc.get_objects() if _is_module(each)]
    inner = {id(child) for module in modules for child in vars(module)["_modules"].values()}
    counts = [
        (sum(id(one) in trained for one in module.parameters()), module)
        for module in modules
        if id(module) not in inner
    ]
    most, model = max(counts, key=lambda pair: pair[0], default=(0, None))
    return model if most else None


def _is_module(thing: object) -> bool:
    """Whether an object is a module whose `__init__` has run."""
    return issubclass(type(thing), nn.Module) and {"_modules", "_parameters"} <= vars(thing).keys()


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of DDP and torch.compile."""
    for _ in range(_MAX_WRAPPERS):
        children = vars(model).get("_modules", {})
        inner = children.get("_orig_mod") or (
            children.get("module") if isinstance(model, DistributedDataParallel) else None
        )
        if inner is None:
            break
        model = inner
    return model


def steps_so_far(optimizer: torch.optim.Optimizer) -> int:
    """Return how many steps an optimizer has made; 0 if its state does not contain the number.

    A fused optimizer has the number on its device. Reading it waits for the device, once per watch.
    It is not read while a graph is captured, which the wait would end.
    """
    state = next(iter(optimizer.state.values()), None)
    number = state.get("step") if isinstance(state, Mapping) else None
    if isinstance(number, int | float):
        return int(number)
    if not isinstance(number, torch.Tensor):
        return 0
    if number.device.type == accelerator.current.kind and accelerator.current.is_capturing():
        return 0
    try:
        return int(number)
    except RuntimeError:  # it has no value, or the device has failed
        return 0


def _alive(value: T | None) -> T:
    if value is None:
        raise ReferenceError("the monitored model was garbage-collected")
    return value
