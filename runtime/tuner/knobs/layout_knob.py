"""Where the training state lies: ZeRO's stage and what is on the host. Each is another engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ....errors import DsConfigError
from ...common.training_config import merged, zero_stage
from ...engine.live_settings.zero_optimizer import total_elements
from ...engine.rebuild.check import unsupported_reason
from ...estimator.engine_plan import planned_layouts
from ...memory.oom.would_fit import Layout
from ..policy.types import Configuration, Value
from .deepspeed_knobs import ZERO

STAGE, OFFLOADS = "zero_stage", ("offload_optimizer", "offload_param")
LAYOUT = (STAGE, *OFFLOADS)
_STAGES = (0, 1, 2, 3)
_SNAPSHOT_BYTES = 12  # a parameter: weights and Adam's two states, in fp32


class ZeroLayouts:
    """The engines that this run could have.

    Args:
        engine: Returns the one in use.
        config: Returns its ds config.
        complete: Makes a ds config of one whose layout was changed.
        world_size: Over which states are shared out.
    """

    def __init__(
        self,
        engine: Callable[[], Any],
        config: Callable[[], Mapping[str, Any]],
        complete: Callable[[Mapping[str, Any]], dict[str, Any]],
        world_size: int,
    ) -> None:
        self._engine, self._config, self._complete = engine, config, complete
        self.world_size = world_size
        self._unsupported_reasons: dict[tuple[Any, ...], str | None] = {}

    def forget(self) -> None:
        """Look anew at what can be rebuilt, as the engine is another."""
        self._unsupported_reasons.clear()

    @property
    def on_host(self) -> bool:
        """Whether training is on the host, so that nothing is won by moving there."""
        return bool(self._engine().device == torch.device("cpu"))

    def now(self) -> dict[str, Value]:
        """Return the layout in use."""
        return configured_layout(self._config())

    def changed(self, target: Configuration) -> dict[str, Any] | None:
        """Return the ds config with that layout; None where it is the layout in use.

        Raises:
            DsConfigError: It makes no ds config.
        """
        config, now = self._config(), self.now()
        wanted = {name: target.get(name, now[name]) for name in LAYOUT}
        if wanted == now:
            return None
        zero: dict[str, Any] = {}
        if wanted[STAGE] != now[STAGE]:
            zero["stage"] = wanted[STAGE]
        for name in OFFLOADS:
            if wanted[name] != now[name]:
                zero[name] = self._offload_block(on=bool(wanted[name]))
        return self._complete(merged(config, {ZERO: zero}))

    def unsupported_reason(self, target: Configuration) -> str | None:
        """Say why the engine cannot be rebuilt with that layout; None if it can, by all signs."""
        wanted = {**self.now(), **{name: target[name] for name in LAYOUT if name in target}}
        key = tuple(wanted.items())
        if key not in self._unsupported_reasons:
            self._unsupported_reasons[key] = self._look(target)
        return self._unsupported_reasons[key]

    def memory_bytes(self, target: Configuration) -> int | None:
        """Return what that layout needs more on the device that is trained on, if planned."""
        now = self.now()
        try:
            planned = planned_layouts(self._engine())
        except DsConfigError:
            return None
        then = planned.get(_as_planned({**now, **target}))
        here = planned.get(_as_planned(now))
        if then is None or here is None:
            return None
        more = then.device_bytes - here.device_bytes
        if self.on_host:  # where a rebuild keeps this rank's part of the states for the time too
            flat = total_elements(self._engine().module.parameters())
            more += then.host_bytes - here.host_bytes
            more = max(more, 0) + _SNAPSHOT_BYTES * flat // self.world_size
        return int(more)

    def _look(self, target: Configuration) -> str | None:
        try:
            config = self.changed(target)
        except DsConfigError as error:
            return str(error)
        if config is None:
            return None
        return unsupported_reason(self._engine(), self._config(), config)

    def _offload_block(self, *, on: bool) -> dict[str, Any]:
        return {"device": "cpu", "pin_memory": not self.on_host} if on else {"device": "none"}


class ZeroLayoutKnob:
    """One side of the layout."""

    def __init__(self, name: str, layouts: ZeroLayouts) -> None:
        self.name = name
        self._layouts = layouts

    def unsupported_reason(self) -> str | None:
        """Say why it is of no use; an offload is always there, if only to be taken back."""
        if self.name == STAGE and self._layouts.world_size == 1:
            return "a lone rank shares nothing out"
        return None

    def get(self) -> Value:
        """Return its value now."""
        return self._layouts.now()[self.name]

    def options(self) -> Sequence[Value]:
        """Return what a rebuild would not refuse and would help, and the present value."""
        every = _STAGES if self.name == STAGE else (False, True)
        return [value for value in every if value == self.get() or self._is_of_use(value)]

    def is_applied(self, value: Value) -> bool:
        """Whether the ds config in use says so."""
        return value == self.get()

    def memory_bytes(self, _: Value) -> int | None:
        """Return None: a layout is planned as a whole."""
        return None

    def _is_of_use(self, value: Value) -> bool:
        if self.name in OFFLOADS and value and self._layouts.on_host:
            return False
        return self._layouts.unsupported_reason({self.name: value}) is None


def configured_layout(config: Mapping[str, Any]) -> dict[str, Value]:
    """Return the layout that a ds config asks for."""
    zero = config.get(ZERO)
    blocks = zero if isinstance(zero, Mapping) else {}
    return {
        STAGE: zero_stage(config),
        **{name: _is_offloaded(blocks.get(name)) for name in OFFLOADS},
    }


def _is_offloaded(block: object) -> bool:
    return isinstance(block, Mapping) and str(block.get("device") or "none") != "none"


def _as_planned(layout: Configuration) -> Layout:
    homes = ("cpu" if layout[name] else "none" for name in OFFLOADS)
    return Layout(int(layout[STAGE] or 0), *homes)
