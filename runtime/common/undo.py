"""Changes that can be taken back: an `Undo` puts exactly what was there, and does nothing twice."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

Undo = Callable[[], None]

_ABSENT = object()


class UndoOnce:
    """Calls a function at most once, and lets go of all it holds then."""

    def __init__(self, undo: Undo) -> None:
        self._undo: Undo | None = undo

    def __call__(self) -> None:
        """Undo, the first time."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()


def chain(undos: Sequence[Undo]) -> Undo:
    """Return what takes all of them back, the last one first."""

    def undo_all() -> None:
        for undo in reversed(undos):
            undo()

    return UndoOnce(undo_all)


def set_attributes(owner: Any, **values: object) -> Undo:
    """Set attributes of an object; what was in its own dictionary, or was not, is restored.

    The object is held weakly, so that an undo nobody calls keeps no engine alive.
    """
    before = {name: vars(owner).get(name, _ABSENT) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    reference = weakref.ref(owner)

    def restore() -> None:
        alive = reference()
        if alive is not None:
            restore_attributes(alive, before)

    return UndoOnce(restore)


def own_attributes(owner: Any, names: Sequence[str]) -> dict[str, object]:
    """Return what the object's own dictionary has under these names, for `restore_attributes`."""
    return {name: vars(owner).get(name, _ABSENT) for name in names}


def restore_attributes(owner: Any, before: dict[str, object]) -> None:
    """Put attributes back as `own_attributes` found them, absent ones included."""
    for name, value in before.items():
        if value is not _ABSENT:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)
