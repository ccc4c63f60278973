"""Defines reversible changes. Each change returns an `Undo`, which restores the state before it.

An `Undo` restores the same objects, not copies, and does nothing when it is called again.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...errors import ZerowatchError

logger = logging.getLogger(__name__)

Undo = Callable[[], None]

# If a change of an engine raises one of these errors, the change is undone. The list includes all
# errors that the use of a library's internals can raise, because another error would leave other
# ranks waiting.
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
    """Calls undos in reverse order. If one fails, the remaining undos are still called."""

    def __init__(self) -> None:
        self._undos: list[Undo] = []

    def add(self, undo: Undo) -> None:
        """Push the undo of the last change."""
        self._undos.append(undo)

    def do(self, changes: Iterable[Callable[[], Undo]]) -> None:
        """Make all changes one after the other, or none of them.

        Raises:
            ZerowatchError: One change failed, and the earlier changes were undone.
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
        """Undo all changes, and then raise the first error, if any."""
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
    """Make changes one after the other, and return one undo for all. If one fails, undo all."""
    undo = UndoStack()
    undo.do(changes)
    return undo


def chain(undos: Sequence[Undo]) -> Undo:
    """Return one undo that calls all given undos in reverse order."""

    def undo_all() -> None:
        for undo in reversed(undos):
            undo()

    return UndoOnce(undo_all)


def set_attributes(owner: Any, **values: object) -> Undo:
    """Set attributes of an object. The undo restores its dictionary, including absent names.

    The undo has only a weak reference to the object, so an unused undo does not keep an engine
    alive.
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
    """Return the entries of these names in the object's dictionary, for `restore_attributes`."""
    return {name: vars(owner).get(name, _ABSENT) for name in names}


def restore_attributes(owner: Any, before: dict[str, object]) -> None:
    """Restore attributes as `own_attributes` found them, and remove names that were absent."""
    for name, value in before.items():
        if value is not _ABSENT:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)
