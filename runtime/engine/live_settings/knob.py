"""One value of a live engine that can be read, changed between two windows, and put back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ....errors import ZerowatchError
from ...common.undo import Undo, UndoOnce, chain
from .zero_optimizer import wait_for_device

Value = int | bool


def _unknown(_: Any, __: Value) -> int | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A knob; every rank turns it alike, between `engine.step()` and the next forward.

    Attributes:
        name: As in DeepSpeed's configuration, without the `stage3_` before it.
        least: Smallest number of elements that makes sense; None for a switch.
        exact: Whether results stay bitwise the same with any number of ranks; else sums over
            more than two ranks may be added up in another order.
        refusal: Why an engine has no such knob; None where it has.
        get: Its value now.
        change: Sets it on an engine that has it.
        holds: Whether all that depends on it was changed along.
        memory: Bytes that buffers of this value take more than those of the present one, less if
            negative; None where that cannot be told. What is copied on the way comes on top.
    """

    name: str
    least: int | None
    exact: bool
    refusal: Callable[[Any], str | None]
    get: Callable[[Any], Value]
    change: Callable[[Any, Value], Undo]
    holds: Callable[[Any, Value], bool]
    memory: Callable[[Any, Value], int | None] = _unknown

    def unavailable(self, engine: Any) -> str | None:
        """Say why this engine has no such knob; None where it has."""
        return self.refusal(engine)

    def apply(self, engine: Any, value: Value) -> Undo:
        """Set the knob, and return what puts back exactly what was there.

        Raises:
            ZerowatchError: The engine has no such knob, or it has no such value.
        """
        reason = self.refusal(engine) or self._wrong(value)
        if reason is not None:
            raise ZerowatchError(f"{self.name} cannot be set to {value!r}: {reason}")
        wait_for_device()
        return UndoOnce(chain([self.change(engine, value), wait_for_device]))

    def verify(self, engine: Any, value: Value) -> bool:
        """Whether the engine really works with this value; False where it has no such knob."""
        if self.refusal(engine) is not None:
            return False
        return self.get(engine) == value and self.holds(engine, value)

    def memory_bytes(self, engine: Any, value: Value) -> int | None:
        """Return the bytes that this value needs more than the present one; negative: less."""
        return None if self.refusal(engine) is not None else self.memory(engine, value)

    def _wrong(self, value: Value) -> str | None:
        if self.least is None:
            return None if isinstance(value, bool) else "it is a switch, True or False"
        if isinstance(value, bool) or not isinstance(value, int) or value < self.least:
            return f"it is a whole number of elements, {self.least} or more"
        return None
