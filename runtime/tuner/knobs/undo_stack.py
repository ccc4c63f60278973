"""Several changes that are taken back together, as far as each can be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from ..policy.transaction import FAILURES
from ..policy.types import Undo

logger = logging.getLogger(__name__)


class UndoStack:
    """Takes back what was done, the last first; one that fails does not keep the rest from it."""

    def __init__(self) -> None:
        self._undos: list[Undo] = []

    def add(self, undo: Undo) -> None:
        """Remember how the last change is taken back."""
        self._undos.append(undo)

    def do(self, changes: Iterable[Callable[[], Undo]]) -> None:
        """Make changes one after the other, all of them or none.

        Raises:
            ZerowatchError: One failed, and those before it were taken back.
        """
        made = UndoStack()
        try:
            for change in changes:
                made.add(change())
        except FAILURES:
            made()
            raise
        self.add(made)

    def __call__(self) -> None:
        """Undo, the first time; raises the first error when all the rest is undone."""
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
