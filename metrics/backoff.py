"""Computes delays between attempts that double after each failure."""

from __future__ import annotations

import time
from collections.abc import Callable


class Backoff:
    """The delay before the next attempt, which doubles after each failure up to a maximum.

    Args:
        first_seconds: The first delay.
        max_seconds: The longest delay.
        now: A monotonic clock, in seconds.
    """

    def __init__(
        self, first_seconds: float, max_seconds: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._first_seconds, self._max_seconds, self._now = first_seconds, max_seconds, now
        self._delay_seconds = first_seconds
        self._due = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the next attempt may start: no delay has begun, or the last delay is over."""
        return self._now() >= self._due

    def start_delay(self) -> None:
        """Start a delay after a failure. The next delay will be twice as long."""
        self._due = self._now() + self._delay_seconds
        self._delay_seconds = min(2 * self._delay_seconds, self._max_seconds)

    def reset(self) -> None:
        """Reset the next delay to `first_seconds`. A delay that has begun does not change."""
        self._delay_seconds = self._first_seconds
