"""What an engine bears besides itself, to be there again after a rebuild back."""

from __future__ import annotations

from ...trainer.engine_holder import EngineHolder
from ...trainer.oom_recovery.escalation import EngineChange
from ..policy.types import Undo


def restore_attachments(changes: EngineHolder) -> Undo:
    """Return what lays on again all that is on the engine now.

    An engine in between may not have borne it, and then it was let go of.
    """
    codec = changes.compressor
    kinds = (EngineChange.ACTIVATION_CHECKPOINTING, EngineChange.OPTIMIZER_STATE_OFFLOAD)
    attachments = {kind: changes.attached(kind) for kind in kinds}

    def undo() -> None:
        for kind, attachment in attachments.items():
            if changes.attached(kind) is not attachment:
                changes.attach(kind, attachment)
        if changes.compressor is not codec:
            changes.set_compressor(codec)

    return undo
