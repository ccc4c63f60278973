"""Knobs of where the training state resides: ZeRO stage and offload. A change needs a rebuild."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....errors import DsConfigError
from ...common.ds_config import EngineSource, merged, training_config, zero_stage
from ...common.gil_pauses import let_training_run
from ...engine.live_settings.zero_optimizer import total_elements
from ...engine.rebuild.preconditions import unsupported_reason, zero_block
from ...estimator.engine_estimate import estimated_layouts
from ...memory.oom.predicted_savings import Layout
from ..policy.knob_registry import OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, SPECS, ZERO_STAGE, KnobSpec
from ..policy.policy_types import Configuration, Value
from .engine_knobs import ZERO
from .knob import ReadableKnob

STAGE = ZERO_STAGE.name
OFFLOADS = (OFFLOAD_OPTIMIZER.name, OFFLOAD_PARAM.name)
LAYOUT = (STAGE, *OFFLOADS)
_OVERLAPPING_STAGE = 2  # and above
_SNAPSHOT_BYTES = 12  # per parameter: weights and Adam's two states, in fp32


class ZeroLayouts:
    """Lists the layouts of the training state that this job could have.

    Args:
        source: Source of the engine in use and its ds config.
        world_size: Ranks that share the training state.
        is_training_run: Whether new ds configs are completed for a TrainingRun.
    """

    def __init__(self, source: EngineSource, world_size: int, *, is_training_run: bool) -> None:
        self._source, self._is_training_run = source, is_training_run
        self.world_size = world_size
        self._reasons: dict[tuple[Any, ...], str | None] = {}
        self._overlap_comm: bool | None = None  # of the last stage that can overlap

    def on_engine_replaced(self) -> None:
        """Check again which layouts are supported, because the engine was replaced."""
        self._reasons.clear()
        self.note_overlap()

    def note_overlap(self) -> None:
        """Note `overlap_comm` of the ds config in use, if its stage can overlap.

        Every rank must call this at the same time, so that all ranks rebuild with the same config.
        """
        if zero_stage(self._source.config) >= _OVERLAPPING_STAGE:
            self._overlap_comm = zero_block(self._source.config).get("overlap_comm")

    @property
    def on_host(self) -> bool:
        """Whether the CPU trains, so that offloading saves nothing."""
        return bool(self._source.engine.device == torch.device("cpu"))

    def now(self) -> dict[str, Value]:
        """Return the layout in use."""
        return configured_layout(self._source.config)

    def is_engine_as_configured(self) -> bool:
        """Whether the engine has the stage of the ds config."""
        stage = zero_stage(self._source.config)
        return bool(self._source.engine.zero_optimization_stage() == stage)

    def changed_config(self, target: Configuration) -> dict[str, Any] | None:
        """Return the ds config with a layout; None if it is the layout in use.

        Raises:
            DsConfigError: The ds config is not valid.
        """
        now = self.now()
        wanted = {name: target.get(name, now[name]) for name in LAYOUT}
        if wanted == now:
            return None
        zero: dict[str, Any] = {}
        if wanted[STAGE] != now[STAGE]:
            zero["stage"] = wanted[STAGE]
            can_overlap = int(wanted[STAGE] or 0) >= _OVERLAPPING_STAGE
            could_overlap = zero_stage(self._source.config) >= _OVERLAPPING_STAGE
            if can_overlap and not could_overlap and self._overlap_comm:
                zero["overlap_comm"] = True  # `training_config` turned it off
        for name in OFFLOADS:
            if wanted[name] != now[name]:
                zero[name] = self._offload_block(name, on=bool(wanted[name]))
        config = merged(self._source.config, {ZERO: zero})
        return training_config(config, is_candidate=True) if self._is_training_run else config

    def unsupported_reason(self, target: Configuration) -> str | None:
        """Return why the engine cannot be rebuilt with a layout; None if no reason is known."""
        wanted = {**self.now(), **{name: target[name] for name in LAYOUT if name in target}}
        key = tuple(wanted.items())
        if key not in self._reasons:
            self._reasons[key] = self._check(target)
        return self._reasons[key]

    def memory_bytes(self, target: Configuration) -> int | None:
        """Return the additional bytes of a layout on the training device; None if unknown."""
        now = self.now()
        try:
            planned = estimated_layouts(self._source.engine)
        except DsConfigError:
            return None
        then = planned.get(_as_layout({**now, **target}))
        here = planned.get(_as_layout(now))
        if then is None or here is None:
            return None
        more = then.device_bytes - here.device_bytes
        if self.on_host:  # a rebuild temporarily keeps this rank's partition of the states as well
            elements = total_elements(self._source.engine.module.parameters())
            more += then.host_bytes - here.host_bytes
            more = max(more, 0) + _SNAPSHOT_BYTES * elements // self.world_size
        return int(more)

    def _check(self, target: Configuration) -> str | None:
        try:
            config = self.changed_config(target)
        except DsConfigError as error:
            return str(error)
        if config is None:
            return None
        return unsupported_reason(self._source.engine, self._source.config, config)

    def _offload_block(self, name: str, *, on: bool) -> dict[str, Any]:
        """Return the changes of an offload's block; its other keys stay as they are."""
        if not on:
            return {"device": "none"}
        if zero_block(self._source.config).get(name):
            return {"device": "cpu"}
        return {"device": "cpu", "pin_memory": not self.on_host}


class ZeroLayoutKnob(ReadableKnob):
    """Reads one part of the layout. A rebuild with `ZeroLayouts.changed_config` sets it."""

    def __init__(self, spec: KnobSpec, layouts: ZeroLayouts) -> None:
        self.spec = spec
        self._layouts = layouts

    def unsupported_reason(self) -> str | None:
        """Return why the stage has no effect; None for an offload, which can always be removed."""
        if self.name == STAGE and self._layouts.world_size == 1:
            return "a single rank has nothing to partition"
        return None

    def get(self) -> Value:
        """Return the value in use."""
        return self._layouts.now()[self.name]

    def is_applied(self, value: Value) -> bool:
        """Whether the ds config has the value, and the engine has the stage of the ds config."""
        return value == self.get() and self._layouts.is_engine_as_configured()

    def options(self) -> Sequence[Value]:
        """Return the value in use, and all values with an effect that a rebuild supports."""
        domain = self.spec.domain
        found = []
        for value in domain if isinstance(domain, tuple) else ():
            if value == self.get() or self._is_useful(value):
                found.append(value)
            let_training_run()
        return found

    def _is_useful(self, value: Value) -> bool:
        if self.spec.moves_to_host and value and self._layouts.on_host:
            return False
        return self._layouts.unsupported_reason({self.name: value}) is None


def layout_knobs(layouts: ZeroLayouts) -> list[ZeroLayoutKnob]:
    """Return the knobs of a layout."""
    return [ZeroLayoutKnob(SPECS[name], layouts) for name in LAYOUT]


def configured_layout(config: Mapping[str, Any]) -> dict[str, Value]:
    """Return the layout of a ds config."""
    blocks = zero_block(config)
    return {
        STAGE: zero_stage(config),
        **{name: _is_offloaded(blocks.get(name)) for name in OFFLOADS},
    }


def _is_offloaded(block: object) -> bool:
    return isinstance(block, Mapping) and str(block.get("device") or "none") != "none"


def _as_layout(layout: Configuration) -> Layout:
    devices = ("cpu" if layout[name] else "none" for name in OFFLOADS)
    return Layout(int(layout[STAGE] or 0), *devices)
