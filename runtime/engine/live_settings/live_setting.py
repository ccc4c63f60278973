"""Defines the base class of live settings: engine attributes to read, change and restore."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from ....errors import ZerowatchError
from ...common.deepspeed_internals import unknown_subclass_reason
from ...common.undo import Undo, UndoOnce, chain
from .zero_optimizer import synchronize_device

SettingValue = int | bool


class LiveSetting(ABC):
    """Sets one value of a live engine; all ranks set it between `step()` and the next forward.

    Attributes:
        name: The key in the ds config, without its `stage3_` prefix.
        minimum: Smallest allowed number of elements; None for a switch.
        uses_optimizer: Whether the setting works only with optimizers that are known.
    """

    name: ClassVar[str]
    minimum: ClassVar[int | None] = None
    uses_optimizer: ClassVar[bool] = True

    def unsupported_reason(self, engine: Any) -> str | None:
        """Return why this engine does not have the setting; None if it does."""
        unknown = unknown_subclass_reason(engine.optimizer) if self.uses_optimizer else None
        return unknown or self._unsupported_reason(engine)

    @abstractmethod
    def get(self, engine: Any) -> SettingValue:
        """Return the present value on an engine that has the setting."""

    def apply(self, engine: Any, value: SettingValue) -> Undo:
        """Set the value and return the undo, which restores exactly the previous state.

        Raises:
            ZerowatchError: The engine does not have the setting, or the value is not allowed.
        """
        reason = self.unsupported_reason(engine) or self._invalid_reason(value)
        if reason is not None:
            raise ZerowatchError(f"{self.name} cannot be set to {value!r}: {reason}")
        synchronize_device()
        return UndoOnce(chain([self._set(engine, value), synchronize_device]))

    def is_applied(self, engine: Any, value: SettingValue) -> bool:
        """Whether the engine and its buffers match the value; False without the setting."""
        if self.unsupported_reason(engine) is not None:
            return False
        return self.get(engine) == value and self._is_consistent(engine, value)

    def memory_bytes(self, engine: Any, value: SettingValue) -> int | None:
        """Return the change in buffer bytes from the present value to this one.

        The result is negative if the buffers shrink, and None if it is not known. It does not
        include temporary copies.
        """
        if self.unsupported_reason(engine) is not None:
            return None
        return self._memory_bytes(engine, value)

    @abstractmethod
    def _unsupported_reason(self, engine: Any) -> str | None:
        """Return `unsupported_reason` for an engine whose optimizer is known."""

    @abstractmethod
    def _set(self, engine: Any, value: SettingValue) -> Undo:
        """Set a valid value on an engine that has the setting."""

    def _is_consistent(self, engine: Any, value: SettingValue) -> bool:
        """Whether everything derived from the value was updated along with it."""
        return True

    def _memory_bytes(self, engine: Any, value: SettingValue) -> int | None:
        """Return `memory_bytes` for an engine that has the setting."""
        return None

    def _invalid_reason(self, value: SettingValue) -> str | None:
        if self.minimum is None:
            return None if isinstance(value, bool) else "it is a switch, True or False"
        if isinstance(value, bool) or not isinstance(value, int) or value < self.minimum:
            return f"it is a whole number of elements, {self.minimum} or more"
        return None
