"""Reads the content of an out-of-memory report from the parts of a memory monitor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...errors import DsConfigError
from ...metrics.catalog.labels import PHASES
from ..common import accelerator
from ..common.torch_engine import TorchEngine
from ..devices.available_memory import available_rank_bytes
from ..devices.cuda_allocator import dump_snapshot
from ..estimator.ds_options import read_options
from ..estimator.engine_estimate import engine_config, engine_shape, estimated_layouts
from ..instrumentation.memory_hooks import MemoryHooks
from ..instrumentation.watch_context import WatchContext
from ..memory.forecast.forecast_service import MemoryForecasts
from ..memory.forecast.peak_readings import PeakPoint, PeakPrediction, Shape
from ..memory.leak_monitor import LeakMonitor
from ..memory.memory_metrics import MemoryMetrics
from ..memory.memory_reader import MemoryReader, Readings
from ..memory.oom.evidence import Limit, OomContext, TrainingSetup
from ..memory.oom.predicted_savings import Layout, LayoutBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """The parts of a memory monitor that an out-of-memory report reads."""

    reader: MemoryReader
    hooks: MemoryHooks
    metrics: MemoryMetrics
    forecasts: MemoryForecasts
    leaks: LeakMonitor


class EngineOomContext(OomContext):
    """Reads the state of a monitored engine. A method that has failed once returns None."""

    def __init__(self, context: WatchContext, parts: MemoryParts) -> None:
        wrap, forecasts = context.fail_open.wrap, parts.forecasts
        self._context = context
        self._parts = parts
        self._readings = wrap("oom report memory", parts.reader.read)
        self._batch_risk = wrap("oom report risk", forecasts.batch_risk)
        self._predict_peak = wrap("oom report risk", forecasts.predict_peak)
        self._peaks = wrap("oom report peaks", forecasts.last_peaks)
        self._predictions = wrap("oom report peaks", forecasts.last_predictions)
        self._limit = wrap("oom report limit", self._configured_limit)
        self._setup = wrap("oom report facts", training_setup)
        self._estimated_layouts = wrap("oom report plan", estimated_layouts)
        self._available_rank_bytes = wrap("oom report host", available_rank_bytes)
        self._has_expandable_segments = wrap(
            "oom report allocator", accelerator.current.has_expandable_segments
        )
        self._dump_snapshot = wrap("oom report snapshot", dump_snapshot)

    def folder(self) -> Path | None:
        """Return the run folder, or None until the run has one."""
        return self._context.folder()

    def step(self) -> int | None:
        """Return the last completed step, or None if the engine was garbage-collected."""
        engine = self._context.engine()
        return None if engine is None else int(engine.global_steps)

    def phase(self) -> str | None:
        """Return the current phase of the training thread."""
        return PHASES[self._context.phase_timer.current]

    def readings(self) -> Readings | None:
        """Read all devices."""
        return self._readings()

    def micro_batch(self) -> int | None:
        """Return the number of the current micro-batch within its step."""
        return self._parts.hooks.micro_batch

    def shape(self) -> Shape | None:
        """Return the shape of the current micro-batch, or of the last one."""
        return self._parts.hooks.shape

    def batch_risk(self, device: str) -> float | None:
        """Return the risk of the current micro-batch, assessed when the micro-batch began."""
        return self._batch_risk(device)

    def categories(self, device: str) -> Mapping[str, float] | None:
        """Return bytes by category at the peak of the last detailed sample."""
        return self._parts.metrics.categories.get(device)

    def peaks(self, device: str) -> Sequence[PeakPoint] | None:
        """Return the last readings at the end of steps, the latest reading last."""
        return self._peaks(device)

    def predictions(self, device: str) -> Sequence[PeakPrediction] | None:
        """Return the predictions made for the last steps."""
        return self._predictions(device)

    def alarm_step(self, device: str) -> int | None:
        """Return the first step of the current alarm."""
        return self._parts.forecasts.alarm_steps.get(device)

    def limit(self, device: str) -> Limit | None:
        """Return the configured limit, if the configured limit is in effect."""
        return self._limit(device)

    def growth_bytes_per_step(self, device: str) -> float | None:
        """Return the growth of a memory leak, in bytes per step."""
        return self._parts.leaks.growth_bytes_per_step(device)

    def setup(self) -> TrainingSetup | None:
        """Return the training configuration of this rank."""
        engine = self._context.engine()
        return None if _has_no_config(engine) else self._setup(engine)

    def predict_peak(self, device: str, shape: Shape) -> float | None:
        """Return the predicted peak bytes of a micro-batch of this shape."""
        return self._predict_peak(device, shape)

    def estimated_layouts(self) -> Mapping[Layout, LayoutBytes] | None:
        """Return the size of model states under the current layout and all possible layouts."""
        engine = self._context.engine()
        return None if _has_no_config(engine) else self._estimated_layouts(engine)

    def available_rank_bytes(self) -> float | None:
        """Return this rank's share of the memory that its node has left."""
        return self._available_rank_bytes()

    def has_expandable_segments(self) -> bool | None:
        """Return whether the device's allocator uses expandable segments."""
        return self._has_expandable_segments()

    def dump_snapshot(self, device: str, path: Path) -> bool | None:
        """Write torch's memory snapshot of a device to a file. Return whether it was written."""
        return self._dump_snapshot(device, path)

    def _configured_limit(self, device: str) -> Limit | None:
        reader = self._parts.reader
        limit = reader.read().get(device, {}).get("limit")
        if limit is None or limit != reader.budgets.get(device):
            return None
        name = "memory.host_limit_bytes" if device == "cpu" else "memory.device_limit_bytes"
        return Limit(num_bytes=limit, name=name)


def _has_no_config(engine: Any) -> bool:
    return engine is None or isinstance(engine, TorchEngine)


def training_setup(engine: Any) -> TrainingSetup | None:
    """Return the training configuration of an engine, or None if it cannot be read."""
    # This module is also part of the monitoring process, which has no engine and no DeepSpeed.
    from ..engine.live_settings.activation_checkpointing import checkpoints_activations

    config = engine_config(engine)
    try:
        options = read_options(config, origin="engine")
    except DsConfigError:
        return None
    return TrainingSetup(
        layout=Layout(options.stage, options.offload_optimizer, options.offload_param),
        world_size=dist.get_world_size(engine.seq_data_parallel_group),
        dtype=options.model_dtype or "fp32",
        samples=config["train_micro_batch_size_per_gpu"],
        accumulation=config["gradient_accumulation_steps"],
        # A trace of modules does not show a function that is recomputed, so False means unknown.
        activation_checkpointing=checkpoints_activations(engine.module)
        or engine_shape(engine).recomputes
        or None,
    )
