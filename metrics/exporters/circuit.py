"""When to try again what keeps failing: after three failures less and less often."""

from __future__ import annotations

import time
from collections.abc import Callable

FAILURES_ALLOWED = 3
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 30.0, 300.0


class CircuitBreaker:
    """Counts failures in a row."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._failures = 0
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._open_until = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether to try: nothing failed of late, or the pause is over."""
        return self._now() >= self._open_until

    def succeeded(self) -> None:
        """Forget the failures."""
        self._failures, self._pause_seconds = 0, FIRST_PAUSE_SECONDS

    def failed(self) -> None:
        """Count a failure; from the third in a row on each begins a pause, longer every time."""
        self._failures += 1
        if self._failures >= FAILURES_ALLOWED:
            self._open_until = self._now() + self._pause_seconds
            self._pause_seconds = min(2 * self._pause_seconds, LAST_PAUSE_SECONDS)
