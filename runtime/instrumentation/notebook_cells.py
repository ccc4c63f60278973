"""Reports the end of each cell that IPython runs, in a notebook or at its prompt.

Between two cells nobody trains, however long the user thinks, so that time belongs to no step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_EVENT = "post_run_cell"


class NotebookCells:
    """Calls a function at the end of each cell, also of one that raised, until `restore`.

    Outside IPython it does nothing.

    Attributes:
        last_failed: Whether the last cell raised an error, or Ctrl-C ended it. None if none has
            ended yet.
    """

    def __init__(self, on_end: Callable[[], object]) -> None:
        self._on_end = on_end
        self.last_failed: bool | None = None
        get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
        shell = None if get_shell is None else get_shell()
        self._events = None if shell is None else shell.events
        if self._events is not None:
            self._events.register(_EVENT, self._on_cell_end)

    def restore(self) -> None:
        """Stop calling the function. Safe to call twice."""
        events, self._events = self._events, None
        if events is not None:
            events.unregister(_EVENT, self._on_cell_end)

    def _on_cell_end(self, result: Any) -> None:
        error = result.error_before_exec or result.error_in_exec
        self.last_failed = error is not None and not isinstance(error, SystemExit)
        self._on_end()
