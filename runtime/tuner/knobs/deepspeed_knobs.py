"""A value of the live engine that is read from DeepSpeed's own attributes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....errors import ZerowatchError
from ...engine.live_settings.knob import Knob
from ...engine.live_settings.knobs import KNOBS
from ...engine.live_settings.zero_optimizer import total_elements
from ..policy.registry import SPECS
from ..policy.types import Undo, Value
from .candidate_sizes import powers_of_two

logger = logging.getLogger(__name__)

ZERO = "zero_optimization"
_STAGE_3 = "stage3_"  # DeepSpeed takes its keys with and without


class DeepSpeedKnob:
    """A knob of `relief`, whose engine may be another one after a rebuild.

    Args:
        knob: Of the engine.
        engine: Returns it.
    """

    def __init__(self, knob: Knob, engine: Callable[[], Any]) -> None:
        self.name = knob.name
        self._knob, self._engine = knob, engine
        # Going back takes the last change off instead of laying another one over it, so that what
        # is turned to and fro, as in a trial, does not pile up.
        self._turned: list[tuple[Value, Undo]] = []
        self._began_as_ours = False

    @property
    def is_ours(self) -> bool:
        """Whether it stands where it was turned to, on this engine or on one before."""
        return self._began_as_ours or bool(self._turned)

    def unsupported_reason(self) -> str | None:
        """Say why the engine has no such knob."""
        return self._knob.unsupported_reason(self._engine())

    def get(self) -> Value:
        """Return its value now."""
        return self._knob.get(self._engine())

    def options(self) -> Sequence[Value]:
        """Return both positions of a switch, or the sizes that differ in what they do."""
        if self._knob.minimum is None:
            return (False, True)
        flat = total_elements(self._engine().module.parameters())
        return powers_of_two(flat, int(self.get() or 0), with_zero=self._knob.minimum == 0)

    def turn(self, value: Value) -> Undo:
        """Set it; what puts it back knows if the knob is gone by then."""
        before = self.get()
        self._set(value)

        def undo() -> None:
            if self.unsupported_reason() is None:
                self._set(before)

        return undo

    def is_applied(self, value: Value) -> bool:
        """Whether the engine really works with it."""
        return isinstance(value, int) and self._knob.is_applied(self._engine(), value)

    def memory_bytes(self, value: Value) -> int | None:
        """Return what it needs more than the present value."""
        if not isinstance(value, int):
            return None
        return self._knob.memory_bytes(self._engine(), value)

    def follow(self, config: Mapping[str, Any]) -> None:
        """Have a new engine work with what was turned on the one before, as its ds config says.

        DeepSpeed follows the ds config by itself, but for what stage 0 has no key for.
        """
        self._began_as_ours = self.is_ours
        self._turned.clear()
        value = configured(self.name, config)
        if not self.is_ours or value is None or self.unsupported_reason() is not None:
            return
        try:
            self._set(value)
        except (RuntimeError, MemoryError, ZerowatchError) as error:
            logger.warning("%s is not %r on the new engine: %s", self.name, value, error)

    def _set(self, value: Value) -> None:
        if self._turned and self._turned[-1][0] == value:
            self._turned.pop()[1]()
        before = self.get()
        if before == value:
            return
        if not isinstance(value, int):
            raise ZerowatchError(f"{self.name} cannot be set to {value!r}")
        self._turned.append((before, self._knob.apply(self._engine(), value)))


def deepspeed_knobs(engine: Callable[[], Any]) -> list[DeepSpeedKnob]:
    """Return hands on all of the engine's values that the tuner may turn."""
    return [DeepSpeedKnob(knob, engine) for knob in KNOBS if knob.name in SPECS]


def with_knob(config: Mapping[str, Any], name: str, value: Value) -> dict[str, Any]:
    """Return a copy of a ds config that asks for this; None for what DeepSpeed does by itself."""
    copy = dict(config)
    block = copy
    *path, key = _place(name, config)
    for each in path:
        below = block.get(each)
        block[each] = dict(below) if isinstance(below, Mapping) else {}
        block = block[each]
    if value is None:
        block.pop(key, None)
    else:
        block[key] = value
    return copy


def configured(name: str, config: Mapping[str, Any]) -> Value:
    """Return what a ds config says of a live knob; None where it says nothing."""
    found: Any = config
    for key in _place(name, config):
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return found if isinstance(found, bool | int) else None


def _place(name: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    path = SPECS[name].ds_key or (name,)
    block, key = config.get(path[0]), path[-1]
    short = key.removeprefix(_STAGE_3)
    if isinstance(block, Mapping) and short in block and key not in block:
        return (*path[:-1], short)
    return path
