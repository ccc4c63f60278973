"""When Python looks for garbage: whenever it likes, or between two windows."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from ....errors import ZerowatchError
from ..policy.types import Undo, Value

AUTOMATIC, BETWEEN_STEPS = "automatic", "between_steps"
# What survives is looked through again then; the youngest objects after every window.
FULL_EVERY_WINDOWS = 100
_YOUNG, _ALL = 1, 2


class GcKnob:
    """Freezes what is there, so that it is never looked through, and collects the rest itself."""

    name = "python_gc"

    def __init__(self) -> None:
        self._is_ours = self._froze = self._was_enabled = self._has_swept = False
        self._windows = 0

    def unsupported_reason(self) -> str | None:
        """Say so where the script switched it off itself."""
        return None if self._is_ours or gc.isenabled() else "the script has switched it off"

    def get(self) -> str:
        """Return its value now."""
        return BETWEEN_STEPS if self._is_ours and not gc.isenabled() else AUTOMATIC

    def options(self) -> Sequence[Value]:
        """Return both."""
        return (AUTOMATIC, BETWEEN_STEPS)

    def turn(self, value: Value) -> Undo:
        """Set it.

        Raises:
            ZerowatchError: There is no such value.
        """
        if value not in self.options():
            raise ZerowatchError(f"{self.name} cannot be set to {value!r}")
        before = self.get()
        self._set(value == BETWEEN_STEPS)
        return lambda: self._set(before == BETWEEN_STEPS)

    def is_applied(self, value: Value) -> bool:
        """Whether it is so."""
        return value == self.get()

    def memory_bytes(self, _: Value) -> int:
        """Return 0: a window's garbage is little."""
        return 0

    def window_ended(self) -> None:
        """Collect what this window left, if that is ours to do."""
        if not self._is_ours:
            return
        self._windows += 1
        gc.collect(_YOUNG if self._windows % FULL_EVERY_WINDOWS else _ALL)

    def close(self) -> None:
        """Leave it to Python again. Safe to call twice."""
        self._set(False)

    def _set(self, is_ours: bool) -> None:
        if is_ours == self._is_ours:
            return
        self._is_ours = is_ours
        if is_ours:
            gc.collect(_YOUNG if self._has_swept else _ALL)  # a trial comes here again and again
            self._has_swept = True
            self._was_enabled, self._froze = gc.isenabled(), gc.get_freeze_count() == 0
            gc.disable()
            if self._froze:
                gc.freeze()
            return
        if self._froze:  # else the script's own would be thawed along
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
