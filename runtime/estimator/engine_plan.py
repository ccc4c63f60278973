"""Plans the step of a live DeepSpeed engine, from the facts that the engine itself holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from .plan import Plan
from .read_module import shape_of
from .shapes import ModelShape, Topology
from .step import plan_step

_FORWARD_AND_BACKWARD = 2


def plan_of_engine(engine: Any, micro_batches: int | None = None) -> Plan:
    """Plan a step of this engine, of so many micro-batches; by default of as many as it is set to.

    In ZeRO-3 the order of the modules is known once two micro-batches were trained; a plan made
    before that assumes the order of registration, and says so.

    Raises:
        DsConfigError: Its configuration cannot be planned, as with values that only its
            initialisation could fill in.
    """
    ranks = dist.get_world_size(engine.seq_data_parallel_group)
    topology = Topology(world_size=ranks, backend=str(dist.get_backend()))
    plan = plan_step(
        engine_shape(engine), engine_config(engine, micro_batches), topology, origin="engine"
    )
    faults = tuple(_unplanned(engine, ranks))
    return replace(plan, exact=plan.exact and not faults, remarks=(*faults, *plan.remarks))


def engine_shape(engine: Any) -> ModelShape:
    """Read this rank's model, with the param groups as they were before they were flattened."""
    trace = _traced_modules(engine)
    if not trace:
        return shape_of(engine.module, _param_groups(engine))
    names = {id(module): name for name, module in engine.module.named_modules()}
    order = list(dict.fromkeys(names[id(module)] for module in trace if id(module) in names))
    visits = Counter(id(module) for module in trace)
    recomputes = max(visits.values()) > _FORWARD_AND_BACKWARD
    shape = shape_of(engine.module, _param_groups(engine), order)
    return replace(shape, recomputes=recomputes)


def engine_config(engine: Any, micro_batches: int | None = None) -> Mapping[str, Any]:
    """Return the configuration in force: the batch sizes are those worked out, or changed since."""
    config = engine._config
    in_force = {
        "train_micro_batch_size_per_gpu": config.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": micro_batches or config.gradient_accumulation_steps,
    }
    name = engine.optimizer_name()
    if name:
        momentum = getattr(engine.basic_optimizer, "defaults", {}).get("momentum", 0)
        in_force["optimizer"] = {"type": str(name), "params": {"momentum": momentum}}
    given = {key: value for key, value in engine.config.items() if key != "train_batch_size"}
    return {**given, **in_force}


def _unplanned(engine: Any, ranks: int) -> Iterable[str]:
    if dist.get_world_size() != ranks:
        yield "Not exact: the collectives of other than data parallelism are not planned."
    if getattr(engine, "has_moe_layers", False):
        yield "Not exact: mixtures of experts are not planned."


def _traced_modules(engine: Any) -> Sequence[nn.Module]:
    """Return the modules of one micro-batch as ZeRO-3 recorded them, forward and backward."""
    offload = getattr(engine.optimizer, "parameter_offload", None)
    if offload is None or not offload.get_param_coordinator().is_complete_trace():
        return ()
    order: Sequence[nn.Module] = getattr(
        offload.get_param_coordinator(), "_PartitionedParameterCoordinator__submodule_order", ()
    )
    return order


def _param_groups(engine: Any) -> Iterable[Mapping[str, Any]]:
    """Return the parameters by group; each of DeepSpeed's optimizers remembers them elsewhere."""
    optimizer = engine.optimizer
    for name in ("bf16_groups", "bit16_groups"):
        groups = getattr(optimizer, name, None)
        if groups is not None:
            return [{"params": group} for group in groups]
    if hasattr(optimizer, "sub_group_to_group_id"):
        by_group: dict[int, list[Any]] = {}
        for number, sub_group in enumerate(optimizer.fp16_groups):
            by_group.setdefault(optimizer.sub_group_to_group_id[number], []).extend(sub_group)
        return [{"params": group} for group in by_group.values()]
    return getattr(optimizer, "param_groups", ())
