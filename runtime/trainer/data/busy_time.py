"""How long this rank works on a sample, without the time in which it waits for others."""

from __future__ import annotations

from collections import deque
from statistics import median

MAX_WINDOWS = 256
RECENT_WINDOWS = 32  # what was before them, where nobody asked for long, may be no longer true


class BusyTime:
    """Collects windows on the training thread; what collectives blocked may come from another.

    Attributes:
        collectives_inside: Whether there is communication in forward and backward. Else nobody
            need tell what it blocked.
    """

    def __init__(self, *, collectives_inside: bool = True) -> None:
        self.collectives_inside = collectives_inside
        self._windows: deque[tuple[int, int, float]] = deque(maxlen=MAX_WINDOWS)
        self._blocked: deque[tuple[int, float]] = deque(maxlen=MAX_WINDOWS)

    def add(self, step: int, num_samples: int, seconds: float) -> None:
        """Take the forward and backward passes of a window: this rank's samples and wall time."""
        self._windows.append((step, num_samples, seconds))

    def blocked(self, step: int, seconds: float) -> None:
        """Take for how long collectives blocked training in those passes. On any thread."""
        self._blocked.append((step, seconds))

    def take(self) -> float | None:
        """Return the recent median seconds per sample; None where nothing new is known."""
        if not self.collectives_inside:
            known = [(samples, seconds) for _, samples, seconds in self._windows]
            self._windows.clear()
        else:
            known = self._take_unblocked()
        if not known:
            return None
        recent = known[-RECENT_WINDOWS:]
        return median(max(seconds, 0.0) / samples for samples, seconds in recent)

    def _take_unblocked(self) -> list[tuple[int, float]]:
        """Return what is known of both; a window whose record is still to come waits for it."""
        blocked = dict(self._blocked.popleft() for _ in range(len(self._blocked)))
        if not blocked:
            return []
        known = [
            (samples, seconds - blocked[step])
            for step, samples, seconds in self._windows
            if step in blocked
        ]
        last = max(blocked)
        self._windows = deque(
            (each for each in self._windows if each[0] > last), maxlen=MAX_WINDOWS
        )
        return known
