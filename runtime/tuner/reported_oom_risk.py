"""How likely this rank is to run out of memory, as far as what was told of it still holds. Pure."""

from __future__ import annotations

STALE_SECONDS = 30.0


class ReportedOomRisk:
    """Takes what the watch thread tells of each step, within a second of it."""

    def __init__(self) -> None:
        self._step, self._risk, self._told_at = 0, 0.0, 0.0
        self._changed_at = -1

    def take(self, *, step: int, risk: float, seconds: float = 0.0) -> None:
        """Take what is told of a step; of those before a change nothing is heeded.

        Args:
            step: Number of the step.
            risk: From 0 to 1.
            seconds: The time, of a clock that does not go back.
        """
        if step > self._changed_at:
            self._step, self._risk, self._told_at = step, risk, seconds

    def changed(self, *, now: int) -> None:
        """Take it that memory is used otherwise after step `now`."""
        self._changed_at, self._risk = now, 0.0

    def risk(self, *, now: int, seconds: float) -> float:
        """Return it as step `now` has ended; 0 where nobody tells it any more.

        Args:
            now: Number of the last step.
            seconds: The time.
        """
        is_stale = now - self._step > 1 and seconds - self._told_at > STALE_SECONDS
        return 0.0 if is_stale else self._risk
