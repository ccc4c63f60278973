"""Notes whether a script ends by `sys.exit` with an error, which exit handlers cannot find out."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from .fail_open import FailOpen
from .patching import AttributePatch


class ExitCalls:
    """Wraps `sys.exit` until `close`. It does not notice `raise SystemExit(1)` and `exit(1)`.

    Nor does it notice calls of a `sys.exit` that the script has imported by name before.

    Args:
        progress: Returns a number that changes when the script goes on.
        fail_open: Guards the note of a call.
    """

    def __init__(self, progress: Callable[[], int], fail_open: FailOpen) -> None:
        self._progress = progress
        self._noted: int | None = None
        note = fail_open.wrap("exit", self._note)

        def make(original: Callable[[Any], NoReturn]) -> Callable[..., NoReturn]:
            def exit_noted(status: Any = None, /) -> NoReturn:
                note(status)
                original(status)

            return exit_noted

        self._patch = AttributePatch(sys, "exit", make)

    @property
    def has_failed(self) -> bool:
        """Whether the script has called `sys.exit` with an error, and has not gone on since."""
        return self._noted is not None and self._progress() == self._noted

    def close(self) -> None:
        """Restore `sys.exit`. Safe to call twice."""
        self._patch.restore()

    def _note(self, status: object) -> None:
        is_success = status is None or (isinstance(status, int) and status == 0)
        # In another thread, `sys.exit` ends that thread only. After Ctrl-C it is no failure.
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not isinstance(sys.exception(), KeyboardInterrupt):
            self._noted = None if is_success else self._progress()
