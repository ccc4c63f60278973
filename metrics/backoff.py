"""The delay before the next attempt after a failure: it doubles up to a maximum."""

from __future__ import annotations

import time
from collections.abc import Callable


class Backoff:
    """Doubling delays between tries.

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
        """Whether to try: the delay is over, or none began yet."""
        return self._now() >= self._due

    def wait(self) -> None:
        """Begin a delay; the one after it is twice as long."""
        self._due = self._now() + self._delay_seconds
        self._delay_seconds = min(2 * self._delay_seconds, self._max_seconds)

    def reset(self) -> None:
        """Make the next delay as short as the first; a delay that has begun does not change."""
        self._delay_seconds = self._first_seconds
