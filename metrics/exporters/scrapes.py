"""The scrapes seen so far: whether a finished rank should wait for one more, and for how long."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise

RECENT_SECONDS = 60.0
INTERVALS_OF_PATIENCE = 1.2
# Enough gaps that two Prometheus servers, whose scrapes alternate, still show their interval.
REMEMBERED_SCRAPES = 5


class Scrapes:
    """Times of the last scrapes, and whether one has read that the run is over."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=REMEMBERED_SCRAPES)
        self._end_was_read = threading.Event()

    def note(self, *, run_active: float | None) -> None:
        """Remember a scrape that has just been answered with this value of run_active."""
        self._times.append(self._clock())
        if run_active == 0:
            self._end_was_read.set()

    def wait_until_end_was_read(self, most_seconds: float) -> None:
        """Block until a scrape has read run_active 0, as long as one can still be expected."""
        self._end_was_read.wait(self.patience_seconds(most_seconds))

    def patience_seconds(self, most_seconds: float) -> float:
        """Return how long the next scrape may take to come; 0 if nobody scrapes."""
        times = tuple(self._times)
        if not times or self._clock() - times[-1] > RECENT_SECONDS:
            return 0.0
        interval = max((later - earlier for earlier, later in pairwise(times)), default=None)
        if interval is None:
            return most_seconds
        return min(most_seconds, INTERVALS_OF_PATIENCE * interval)
