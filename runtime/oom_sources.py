"""What a post-mortem is told of this run, taken from the parts that know it. Nothing here waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch.distributed as dist

from ..errors import DsConfigError
from ..metrics.catalog.labels import PHASES
from .forecasts import Forecasts
from .leak_watch import LeakWatch
from .memory.meter import MemoryMeter
from .memory_figures import MemoryFigures
from .memory_hooks import MemoryHooks
from .oom.evidence import Limit, RunFacts, Sources
from .oom.snapshot import dump_snapshot
from .oom.would_fit import Layout, Planned
from .plan.engine_plan import engine_config, engine_shape
from .plan.options import read_options
from .plan.peak import peak_of
from .plan.shapes import Topology
from .plan.step import plan_step
from .surroundings import Surroundings

_STAGES = (0, 1, 2, 3)
# Optimizer and parameters on the device, on the host, or on NVMe, which takes stage 3.
_HOMES = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"))
_NVME_HOMES = (("nvme", "none"), ("nvme", "cpu"), ("cpu", "nvme"), ("nvme", "nvme"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """The parts of a memory watch."""

    meter: MemoryMeter
    hooks: MemoryHooks
    figures: MemoryFigures
    forecasts: Forecasts
    leaks: LeakWatch


def oom_sources(around: Surroundings, parts: MemoryParts) -> Sources:
    """Put together what a post-mortem asks; a source that fails is left out."""
    guard = around.hooks.guard
    forecasts, hooks = parts.forecasts, parts.hooks
    return Sources(
        folder=around.folder,
        step=_of_engine(around, lambda engine: int(engine.global_steps)),
        phase=lambda: PHASES[around.clock.current],
        readings=guard("post-mortem memory", parts.meter.read),
        micro_batch=lambda: hooks.micro_batch,
        shape=lambda: hooks.shape,
        batch_risk=guard("post-mortem risk", forecasts.judged),
        categories=parts.figures.categories.get,
        peaks=guard("post-mortem peaks", forecasts.last_peaks),
        foresights=guard("post-mortem peaks", forecasts.last_foresights),
        alarm_step=forecasts.foreseen.get,
        limit=guard("post-mortem limit", partial(_budget, parts.meter)),
        growth=parts.leaks.growth,
        facts=guard("post-mortem facts", _of_engine(around, run_facts)),
        predicted=guard("post-mortem risk", forecasts.predicted),
        planned=guard("post-mortem plan", _of_engine(around, planned_layouts)),
        snapshot=guard("post-mortem snapshot", dump_snapshot),
    )


def _budget(meter: MemoryMeter, device: str) -> Limit | None:
    """Return a limit that the settings have set; of all others the report finds the name."""
    limit = meter.read().get(device, {}).get("limit")
    if limit is None or limit != meter.budgets.get(device):
        return None
    name = "memory.host_limit_bytes" if device == "cpu" else "memory.device_limit_bytes"
    return Limit(num_bytes=limit, name=name)


def run_facts(engine: Any) -> RunFacts | None:
    """Say how an engine trains; None where its configuration cannot be read."""
    config = engine_config(engine)
    try:
        options = read_options(config, origin="engine")
    except DsConfigError:
        return None
    return RunFacts(
        layout=Layout(options.stage, options.offload_optimizer, options.offload_param),
        world_size=dist.get_world_size(engine.seq_data_parallel_group),
        dtype=options.model_dtype or "fp32",
        samples=config["train_micro_batch_size_per_gpu"],
        accumulation=config["gradient_accumulation_steps"],
        checkpointing=options.activation_checkpointing or None,
    )


def planned_layouts(engine: Any) -> Mapping[Layout, Planned]:
    """Plan model states for every stage and offload that this engine could have."""
    config, shape = engine_config(engine), engine_shape(engine)
    ranks = dist.get_world_size(engine.seq_data_parallel_group)
    topology = Topology(world_size=ranks, backend=str(dist.get_backend()))
    planned: dict[Layout, Planned] = {}
    homes = [*product(_STAGES, _HOMES), *product((3,), _NVME_HOMES)]
    for stage, (optimizer, parameters) in homes:
        changed = _with_offload(config, optimizer, parameters)
        try:
            memory = plan_step(shape, changed, topology, stage=stage, origin="engine").memory
        except DsConfigError:  # this stage cannot do that
            continue
        peak = peak_of(memory, micro_batches=config["gradient_accumulation_steps"])
        planned[Layout(stage, optimizer, parameters)] = Planned(
            device_bytes=peak.device_bytes, host_bytes=peak.host_bytes
        )
    return planned


def _with_offload(config: Mapping[str, Any], optimizer: str, parameters: str) -> dict[str, Any]:
    zero = dict(config.get("zero_optimization", {}))
    for key, home in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        zero[key] = {**(zero.get(key) or {}), "device": home}
    return {**config, "zero_optimization": zero}


def _of_engine(around: Surroundings, ask: Callable[[Any], Any]) -> Callable[[], Any]:
    def answer() -> Any:
        engine = around.engine()
        return None if engine is None else ask(engine)

    return answer
