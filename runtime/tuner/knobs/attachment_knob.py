"""What is laid on an engine or not: activation checkpointing, and the optimizer's sleep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ....errors import ZerowatchError
from ...engine.live_settings import activation_checkpointing, optimizer_state_offload
from ...engine.live_settings.choose_modules import ModuleSelector
from ...trainer.engine_holder import CHECKPOINTING, SLEEP, EngineHolder
from ..policy.types import Undo, Value


class AttachmentKnob:
    """A switch for one thing that an engine can bear; a rebuild takes it along.

    Args:
        name: Of the knob.
        changes: Holds the engine.
        place: Under which name the engine bears it.
        apply: Lays it on.
        refusal: Why it would be of no use on an engine that does not bear it.
    """

    def __init__(
        self,
        name: str,
        changes: EngineHolder,
        place: str,
        apply: Callable[[Any], Undo],
        refusal: Callable[[Any], str | None],
    ) -> None:
        self.name = name
        self._changes, self._place = changes, place
        self._apply, self._refusal = apply, refusal

    def unavailable(self) -> str | None:
        """Say why it cannot be laid on; None where it is on."""
        return None if self.get() else self._refusal(self._changes.engine)

    def get(self) -> bool:
        """Return whether it is on."""
        return self._changes.attached(self._place) is not None

    def options(self) -> Sequence[Value]:
        """Return both."""
        return (False, True)

    def turn(self, value: Value) -> Undo:
        """Lay it on or take it off.

        Raises:
            ZerowatchError: It cannot be laid on.
        """
        if not isinstance(value, bool):
            raise ZerowatchError(f"{self.name} is True or False, got {value!r}")
        before = self._changes.attached(self._place)
        if value != (before is not None):
            self._changes.attach(self._place, self._apply if value else None)
        return lambda: self._put_back(before)

    def holds(self, value: Value) -> bool:
        """Whether it is so."""
        return value == self.get()

    def memory_bytes(self, _: Value) -> int | None:
        """Return None: what it gives back is known once it was tried."""
        return None

    def _put_back(self, before: Callable[[Any], Undo] | None) -> None:
        if self._changes.attached(self._place) is not before:
            self._changes.attach(self._place, before)


def checkpointing_knob(changes: EngineHolder, chosen: ModuleSelector) -> AttachmentKnob:
    """Return hands on activation checkpointing, of the modules that the caller chose."""
    return AttachmentKnob(
        "activation_checkpointing",
        changes,
        CHECKPOINTING,
        partial(activation_checkpointing.apply, chosen=chosen),
        partial(activation_checkpointing.unavailable, chosen=chosen),
    )


def optimizer_offload_knob(changes: EngineHolder) -> AttachmentKnob:
    """Return hands on the optimizer's sleep."""
    return AttachmentKnob(
        "optimizer_sleep",
        changes,
        SLEEP,
        optimizer_state_offload.apply,
        optimizer_state_offload.unavailable,
    )
