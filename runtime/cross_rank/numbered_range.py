"""A stretch of numbered values that arrives in pieces, and may have gaps."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]

# Values that nobody uses, as when one rank no longer gets on, must not pile up.
MOST_VALUES = 1 << 16


class NumberedRange:
    """The latest gapless run of values; the first has number `first`, `end` comes next."""

    def __init__(self, first: int, values: Values) -> None:
        self.first = first
        self.values = values

    @property
    def end(self) -> int:
        """The number of the value that would come next."""
        return self.first + len(self.values)

    def add(self, first: int, values: Values) -> bool:
        """Take a piece; return whether it joined on.

        What lies before a gap is let go, and the oldest of more than MOST_VALUES.
        """
        if first > self.end:
            self.first, self.values = first, values
            return False
        new = values[self.end - first :]
        if len(new):
            self.values = np.concatenate((self.values, new)) if len(self.values) else new
            self.forget(self.end - MOST_VALUES)
        return True

    def between(self, first: int, end: int) -> Values:
        """Return the values from number `first` up to `end`; all of that must be there."""
        return self.values[first - self.first : end - self.first]

    def forget(self, before: int) -> None:
        """Let go of values that were used."""
        if before > self.first:
            self.first, self.values = before, self.values[before - self.first :]
