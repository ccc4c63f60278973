"""Distinguishes an error that ends a run from one already handled when the run began."""

from __future__ import annotations

import sys
from typing import Any


class OuterError:
    """Remembers the error that is being handled now, such as in `except OSError: train()`.

    It also remembers the last uncaught error, such as that of an earlier cell of a notebook. It
    keeps the dictionaries of the errors only. A reference to an error would keep its traceback,
    with the tensors of a failed step, and built-in errors allow no weak references.
    """

    def __init__(self) -> None:
        self._attributes = _attributes(sys.exception())
        self._attributes_of_uncaught = _attributes(_uncaught())

    def newer(self) -> BaseException | None:
        """Return the error that is being handled, or None if it is the remembered one."""
        error = sys.exception()
        return None if _attributes(error) is self._attributes else error

    def newer_uncaught(self) -> BaseException | None:
        """Return the last uncaught error, or None if it is the remembered one.

        The interpreter sets it before exit handlers run. IPython sets it after each cell that
        raised, and goes on.
        """
        error = _uncaught()
        return None if _attributes(error) is self._attributes_of_uncaught else error


def _uncaught() -> BaseException | None:
    return getattr(sys, "last_value", None)


def _attributes(error: BaseException | None) -> dict[str, Any] | None:
    return None if error is None else vars(error)
