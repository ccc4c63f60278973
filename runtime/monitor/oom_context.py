"""What a post-mortem is told of this run, taken from the parts that know it. Nothing here waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from ...errors import DsConfigError
from ...metrics.catalog.labels import PHASES
from ..estimator.engine_plan import engine_config, planned_layouts
from ..estimator.options import read_options
from ..instrumentation.memory_hooks import MemoryHooks
from ..instrumentation.watch_context import WatchContext
from ..memory.allocator_snapshot import dump_snapshot
from ..memory.forecast_service import MemoryForecasts
from ..memory.leak_monitor import LeakMonitor
from ..memory.memory_reader import MemoryReader
from ..memory.metrics import MemoryMetrics
from ..memory.oom.evidence import Limit, OomContext, RunFacts
from ..memory.oom.would_fit import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """The parts of a memory watch."""

    reader: MemoryReader
    hooks: MemoryHooks
    metrics: MemoryMetrics
    forecasts: MemoryForecasts
    leaks: LeakMonitor


def oom_sources(context: WatchContext, parts: MemoryParts) -> OomContext:
    """Put together what a post-mortem asks; a source that fails is left out."""
    wrap = context.fail_open.wrap
    forecasts, hooks = parts.forecasts, parts.hooks
    return OomContext(
        folder=context.folder,
        step=_of_engine(context, lambda engine: int(engine.global_steps)),
        phase=lambda: PHASES[context.clock.current],
        readings=wrap("oom report memory", parts.reader.read),
        micro_batch=lambda: hooks.micro_batch,
        shape=lambda: hooks.shape,
        batch_risk=wrap("oom report risk", forecasts.batch_risk),
        categories=parts.metrics.categories.get,
        peaks=wrap("oom report peaks", forecasts.last_peaks),
        foresights=wrap("oom report peaks", forecasts.last_predictions),
        alarm_step=forecasts.alarm_steps.get,
        limit=wrap("oom report limit", partial(_budget, parts.reader)),
        growth=parts.leaks.growth_bytes_per_step,
        facts=wrap("oom report facts", _of_engine(context, run_facts)),
        predicted=wrap("oom report risk", forecasts.predict_peak),
        planned=wrap("oom report plan", _of_engine(context, planned_layouts)),
        snapshot=wrap("oom report snapshot", dump_snapshot),
    )


def _budget(reader: MemoryReader, device: str) -> Limit | None:
    """Return a limit that the settings have set; of all others the report finds the name."""
    limit = reader.read().get(device, {}).get("limit")
    if limit is None or limit != reader.budgets.get(device):
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


def _of_engine(context: WatchContext, ask: Callable[[Any], Any]) -> Callable[[], Any]:
    def answer() -> Any:
        engine = context.engine()
        return None if engine is None else ask(engine)

    return answer
