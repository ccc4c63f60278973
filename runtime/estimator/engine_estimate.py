"""Estimates the traffic and memory of a live DeepSpeed engine, from its own ds config and model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Adam, AdamW

from ...errors import DsConfigError
from ..common.group_backend import backend_name
from ..common.torch_engine import TorchEngine
from ..memory.oom.predicted_savings import Layout, LayoutBytes
from .config_reader import STAGES
from .estimate_step import estimate_step
from .model_memory import peak_of
from .model_shape import ModelShape, Topology
from .read_module import read_model_shape
from .step_estimate import StepEstimate

_FORWARD_AND_BACKWARD = 2

# Devices of optimizer states and of parameters. NVMe requires stage 3.
_OFFLOADS = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"))
_NVME_OFFLOADS = (("nvme", "none"), ("nvme", "cpu"), ("cpu", "nvme"), ("nvme", "nvme"))


def estimate_of_engine(engine: Any, micro_batches: int | None = None) -> StepEstimate:
    """Return the estimate of one step of an engine.

    In ZeRO-3 the order of modules is known after two training micro-batches. An earlier estimate
    assumes the order of registration, and lists that assumption.

    Args:
        engine: The engine.
        micro_batches: Micro-batches of the step; by default the engine's accumulation steps.

    Raises:
        DsConfigError: Its configuration cannot be estimated, for example because of values that
            only its initialization fills in.
    """
    topology = _topology(engine)
    estimate = estimate_step(
        engine_shape(engine), engine_config(engine, micro_batches), topology, origin="engine"
    )
    reasons = tuple(_inexact_reasons(engine, topology.world_size))
    return replace(
        estimate, exact=estimate.exact and not reasons, remarks=(*reasons, *estimate.remarks)
    )


def estimated_layouts(engine: Any) -> Mapping[Layout, LayoutBytes]:
    """Return the bytes of model states under every ZeRO stage and offload the engine supports."""
    config, shape, topology = engine_config(engine), engine_shape(engine), _topology(engine)
    estimated: dict[Layout, LayoutBytes] = {}
    highest = _highest_stage(engine)
    candidates = [*product(STAGES, _OFFLOADS), *product((3,), _NVME_OFFLOADS)]
    for stage, (optimizer, parameters) in candidates:
        if stage > highest:
            continue
        changed = _with_offload(config, optimizer, parameters)
        try:
            memory = estimate_step(shape, changed, topology, stage=stage, origin="engine").memory
        except DsConfigError:  # not supported at this stage
            continue
        peak = peak_of(memory, micro_batches=config["gradient_accumulation_steps"])
        estimated[Layout(stage, optimizer, parameters)] = LayoutBytes(
            device_bytes=peak.device_bytes, host_bytes=peak.host_bytes
        )
    return estimated


def _highest_stage(engine: Any) -> int:
    """Return the highest stage for the engine's layers (engine.py:2197).

    DeepSpeed's mixture-of-experts layers do not support stage 3, except those of AutoEP.
    """
    if not getattr(engine, "has_moe_layers", False):
        return STAGES[-1]
    return max(2, int(engine.zero_optimization_stage()))


def engine_shape(engine: Any) -> ModelShape:
    """Return the shape of this rank's model, with its param groups as before flattening."""
    trace = _traced_modules(engine)
    if not trace:
        return read_model_shape(engine.module, _param_groups(engine))
    names = {id(module): name for name, module in engine.module.named_modules()}
    visits = [names[id(module)] for module in trace if id(module) in names]
    forward = _forward_visits(visits)
    calls = Counter(forward)
    recomputes = any(
        count > _FORWARD_AND_BACKWARD * calls[name] for name, count in Counter(visits).items()
    )
    shape = read_model_shape(engine.module, _param_groups(engine), forward)
    return replace(shape, recomputes=recomputes)


def _forward_visits(visits: Sequence[str]) -> Sequence[str]:
    """Return the visits of forward: those before backward, which begins with the root, too.

    If backward does not see the root, each module counts as called once.
    """
    if "" not in visits[1:]:
        return list(dict.fromkeys(visits))
    return visits[: visits.index("", 1)]


def engine_config(engine: Any, micro_batches: int | None = None) -> Mapping[str, Any]:
    """Return the engine's ds config with its current batch sizes and optimizer."""
    config = engine._config
    current = {
        "train_micro_batch_size_per_gpu": config.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": micro_batches or config.gradient_accumulation_steps,
        # Otherwise there would be no advice on ZeRO for an optimizer that only needs this key.
        "zero_allow_untested_optimizer": True,
    }
    name = engine.optimizer_name()
    if name:
        optimizer = engine.basic_optimizer
        current["optimizer"] = {
            "type": str(name),
            "params": {
                "momentum": getattr(optimizer, "defaults", {}).get("momentum", 0),
                "torch_adam": isinstance(optimizer, (Adam, AdamW)),
            },
        }
    given = {key: value for key, value in engine.config.items() if key != "train_batch_size"}
    return {**given, **current}


def is_data_parallel(engine: Any) -> bool:
    """Return whether the engine is parallel over data only, not over pipelines or experts."""
    splits_model = (
        isinstance(engine, TorchEngine)  # there is no ds config to predict from
        or hasattr(type(engine), "train_batch")
        or getattr(engine, "has_moe_layers", False)
        or getattr(engine, "sequence_parallel_size", 1) > 1
    )
    if splits_model or not dist.is_initialized():
        return False
    ranks: int = dist.get_world_size(engine.seq_data_parallel_group)
    return ranks == dist.get_world_size()


def _topology(engine: Any) -> Topology:
    ranks = dist.get_world_size(engine.seq_data_parallel_group)
    return Topology(world_size=ranks, backend=backend_name())


def _with_offload(config: Mapping[str, Any], optimizer: str, parameters: str) -> dict[str, Any]:
    zero = dict(config.get("zero_optimization", {}))
    for key, device in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        zero[key] = {**(zero.get(key) or {}), "device": device}
    return {**config, "zero_optimization": zero}


def _inexact_reasons(engine: Any, ranks: int) -> Iterable[str]:
    if dist.get_world_size() != ranks:
        yield "Not exact: only the collectives of data parallelism are modeled."


def _traced_modules(engine: Any) -> Sequence[nn.Module]:
    """Return the modules of one micro-batch as ZeRO-3 traced them, forward and backward."""
    offload = getattr(engine.optimizer, "parameter_offload", None)
    if offload is None or not offload.get_param_coordinator().is_complete_trace():
        return ()
    order: Sequence[nn.Module] = getattr(
        offload.get_param_coordinator(), "_PartitionedParameterCoordinator__submodule_order", ()
    )
    return order


def _param_groups(engine: Any) -> Iterable[Mapping[str, Any]]:
    """Return the parameters by group; the attribute differs between DeepSpeed's optimizers."""
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
