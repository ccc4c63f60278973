"""Defines reversible changes: each returns an `Undo`, which restores the state before.

An `Undo` restores the very same objects, and does nothing when it is called again.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...errors import ZerowatchError

logger = logging.getLogger(__name__)

Undo = Callable[[], None]

# Errors of a change of an engine that are handled by undoing it. They include all that using a
# library's internals can raise, because an error outside this list would leave other ranks waiting.
FAILURES = (
    ZerowatchError,
    RuntimeError,
    MemoryError,
    OSError,
    AttributeError,
    ImportError,
    ArithmeticError,
    TypeError,
    ValueError,
    LookupError,
    AssertionError,
)

_ABSENT = object()


class UndoOnce:
    """Calls a function at most once, and then drops its reference to the function."""

    def __init__(self, undo: Undo) -> None:
        self._undo: Undo | None = undo

    def __call__(self) -> None:
        """Call the function, unless it was called before."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()


class UndoStack:
    """Calls undos in reverse order; the remaining undos are called even if one fails."""

    def __init__(self) -> None:
        self._undos: list[Undo] = []

    def add(self, undo: Undo) -> None:
        """Push the undo of the last change."""
        self._undos.append(undo)

    def do(self, changes: Iterable[Callable[[], Undo]]) -> None:
        """Make changes one after the other, all of them or none.

        Raises:
            ZerowatchError: One failed, and those before it were undone.
        """
        stack = UndoStack()
        try:
            for change in changes:
                stack.add(change())
        except FAILURES:
            stack()
            raise
        self.add(stack)

    def __call__(self) -> None:
        """Undo the changes; raise the first error after the others are undone."""
        errors: list[BaseException] = []
        while self._undos:
            undo = self._undos.pop()
            try:
                undo()
            except FAILURES as error:
                logger.error("undoing a change failed: %s: %s", type(error).__name__, error)
                errors.append(error)
        if errors:
            raise errors[0]


def apply_all(changes: Iterable[Callable[[], Undo]]) -> Undo:
    """Make changes one after the other, and return the undo of all. If one fails, undo all."""
    undo = UndoStack()
    undo.do(changes)
    return undo


def chain(undos: Sequence[Undo]) -> Undo:
    """Return one undo that calls all of these, the last one first."""

    def undo_all() -> None:
        for undo in reversed(undos):
            undo()

    return UndoOnce(undo_all)


def set_attributes(owner: Any, **values: object) -> Undo:
    """Set attributes of an object; the undo restores its own dictionary, absent names included.

    The object is referenced weakly, so that an undo that is never called keeps no engine alive.
    """
    before = own_attributes(owner, list(values))
    for name, value in values.items():
        setattr(owner, name, value)
    reference = weakref.ref(owner)

    def restore() -> None:
        alive = reference()
        if alive is not None:
            restore_attributes(alive, before)

    return UndoOnce(restore)


def own_attributes(owner: Any, names: Sequence[str]) -> dict[str, object]:
    """Return these names of the object's own dictionary, for `restore_attributes`."""
    return {name: vars(owner).get(name, _ABSENT) for name in names}


def restore_attributes(owner: Any, before: dict[str, object]) -> None:
    """Restore attributes as `own_attributes` found them, absent ones included."""
    for name, value in before.items():
        if value is not _ABSENT:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)
