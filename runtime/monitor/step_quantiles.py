"""Computes exact quantiles of the durations of the last steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import ceil

QUANTILES = {"0.5": 0.5, "0.9": 0.9, "0.99": 0.99}  # by the value of the label
# The window: the steps of this time, or this many steps if they took longer.
WINDOW_SECONDS = 60.0
WINDOW_STEPS = 20


class StepQuantiles:
    """Keeps the durations of the last minute, or of the last 20 steps if those took longer.

    The watch thread adds the steps of a second together, so that a step counts as ended up to a
    second late.

    Args:
        now: A monotonic clock, in seconds.

    Examples:
        >>> quantiles = StepQuantiles()
        >>> quantiles.add([0.4, 0.2, 0.3])
        >>> quantiles.current()
        {'0.5': 0.3, '0.9': 0.4, '0.99': 0.4}
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._steps: deque[tuple[float, float]] = deque()  # when it was added, and its duration
        self._quantiles: Mapping[str, float] = {}

    def add(self, durations: Sequence[float]) -> None:
        """Add the durations of steps that have just ended, in seconds."""
        now = self._now()
        self._steps.extend((now, seconds) for seconds in durations)
        if durations:
            self._quantiles = {}

    def current(self) -> Mapping[str, float]:
        """Return the quantiles of the window in seconds, by label; empty before the first step.

        A quantile is the shortest duration that at least this share of the steps did not exceed.
        """
        steps, oldest = self._steps, self._now() - WINDOW_SECONDS
        while len(steps) > WINDOW_STEPS and steps[0][0] < oldest:
            steps.popleft()
            self._quantiles = {}
        if steps and not self._quantiles:
            durations = sorted(seconds for _, seconds in steps)
            self._quantiles = {
                label: durations[ceil(share * len(durations)) - 1]
                for label, share in QUANTILES.items()
            }
        return self._quantiles
