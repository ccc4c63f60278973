"""Tells an error that ends a run from one that the script already handled when the run began."""

from __future__ import annotations

import sys


class OuterError:
    """Remembers the error that is being handled now, such as in `except OSError: train()`.

    It keeps the dictionary of the error only. A reference to the error would keep its traceback,
    with the tensors of a failed step, and built-in errors allow no weak references.
    """

    def __init__(self) -> None:
        error = sys.exception()
        self._attributes = None if error is None else vars(error)

    def is_it(self, error: BaseException | None) -> bool:
        """Return whether an error is the remembered one."""
        return error is not None and vars(error) is self._attributes

    def newer(self) -> BaseException | None:
        """Return the error that is being handled, or None if it is the remembered one."""
        error = sys.exception()
        return None if self.is_it(error) else error
