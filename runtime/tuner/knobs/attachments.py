"""What an engine bears besides itself, to be there again after a rebuild back."""

from __future__ import annotations

from ...trainer.engine_holder import CHECKPOINTING, SLEEP, EngineHolder
from ..policy.types import Undo


def restore_attachments(changes: EngineHolder) -> Undo:
    """Return what lays on again all that is on the engine now.

    An engine in between may not have borne it, and then it was let go of.
    """
    codec = changes.codec
    places = {name: changes.attached(name) for name in (CHECKPOINTING, SLEEP)}

    def undo() -> None:
        for name, apply in places.items():
            if changes.attached(name) is not apply:
                changes.attach(name, apply)
        if changes.codec is not codec:
            changes.send_through(codec)

    return undo
