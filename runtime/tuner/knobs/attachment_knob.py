"""Knobs of what is attached to an engine: activation checkpointing, optimizer state offload."""

from __future__ import annotations

from collections.abc import Sequence

from ....errors import ZerowatchError
from ...engine.live_settings.activation_checkpointing import ActivationCheckpointing
from ...engine.live_settings.choose_modules import ModuleSelector
from ...engine.live_settings.optimizer_state_offload import OptimizerStateOffload
from ...trainer.engine_holder import Attachment, EngineHolder, MemorySaving
from ...trainer.oom_recovery.escalation import EngineChange
from ..policy.types import Undo, Value


class AttachmentKnob:
    """A switch for one attachment of an engine; a rebuild takes it along.

    Args:
        name: Of the knob.
        changes: Holds the engine.
        kind: Under which the engine holder keeps it.
        attachment: What is attached.
    """

    def __init__(
        self, name: str, changes: EngineHolder, kind: EngineChange, attachment: MemorySaving
    ) -> None:
        self.name = name
        self._changes, self._kind, self._attachment = changes, kind, attachment

    def unsupported_reason(self) -> str | None:
        """Return why it cannot be attached; None where it is on."""
        return None if self.get() else self._attachment.unsupported_reason(self._changes.engine)

    def get(self) -> bool:
        """Return whether it is on."""
        return self._changes.attached(self._kind) is not None

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
        before = self._changes.attached(self._kind)
        if value != (before is not None):
            self._changes.attach(self._kind, self._attachment if value else None)
        return lambda: self._put_back(before)

    def is_applied(self, value: Value) -> bool:
        """Whether it is so."""
        return value == self.get()

    def memory_bytes(self, _: Value) -> int | None:
        """Return None: what it gives back is known once it was tried."""
        return None

    def _put_back(self, before: Attachment | None) -> None:
        if self._changes.attached(self._kind) is not before:
            self._changes.attach(self._kind, before)


def checkpointing_knob(changes: EngineHolder, chosen: ModuleSelector) -> AttachmentKnob:
    """Return the knob of activation checkpointing, of the modules that the caller chose."""
    return AttachmentKnob(
        "activation_checkpointing",
        changes,
        EngineChange.ACTIVATION_CHECKPOINTING,
        ActivationCheckpointing(chosen),
    )


def optimizer_offload_knob(changes: EngineHolder) -> AttachmentKnob:
    """Return the knob of optimizer states on the host between updates."""
    return AttachmentKnob(
        "optimizer_sleep",
        changes,
        EngineChange.OPTIMIZER_STATE_OFFLOAD,
        OptimizerStateOffload(),
    )
