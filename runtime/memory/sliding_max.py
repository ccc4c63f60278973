"""The highest of the last minute's values, so that a scrape misses no peak between two readings."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 60.0  # at least as long as the usual scrape intervals


class SlidingMax:
    """Keeps, in falling order, the values that may yet be the highest of the window."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._values: deque[tuple[float, float]] = deque()

    def add(self, value: float) -> float:
        """Take a new value and return the highest of the window, it included."""
        now = self._now()
        while self._values and self._values[-1][1] <= value:
            self._values.pop()
        self._values.append((now, value))
        while self._values[0][0] < now - WINDOW_SECONDS:
            self._values.popleft()
        return self._values[0][1]
