"""When to try again what keeps failing: after three failures in a row less and less often."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..backoff import Backoff

FAILURES_ALLOWED = 3
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 30.0, 300.0


class CircuitBreaker:
    """Counts failures in a row, and pauses from the third on."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._failures = 0
        self._backoff = Backoff(FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS, now)

    @property
    def is_closed(self) -> bool:
        """Whether to try: there were less than three failures, or the pause is over."""
        return self._backoff.is_due

    def succeeded(self) -> None:
        """Forget the failures."""
        self._failures = 0
        self._backoff.reset()

    def failed(self) -> None:
        """Count a failure; from the third in a row on each begins a pause, longer every time."""
        self._failures += 1
        if self._failures >= FAILURES_ALLOWED:
            self._backoff.wait()
