"""Defines the time ranges and intervals of recording rules and alerts."""

from __future__ import annotations

from dataclasses import dataclass

MINUTE = 60.0
SHORT_SECONDS = 5 * MINUTE
LONG_SECONDS = 30 * MINUTE
HOUR = 60 * MINUTE
_EVALUATION_SECONDS = 15.0  # between two evaluations of the rules
_LEAST_EVALUATION_SECONDS = 1.0  # the same, however small the scale is
# Prometheus' units of time in milliseconds, the largest first.
_UNITS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1000, "s"), (1, "ms"))


@dataclass(frozen=True, slots=True)
class Timing:
    """The ranges and intervals of rules as Prometheus durations, multiplied by `scale`.

    Args:
        scale: 1 in the shipped rules. Tests of the same rules use less: with 1/30, five minutes
            become ten seconds.
    """

    scale: float = 1.0

    def duration(self, seconds: float) -> str:
        """Return a duration in the largest unit that divides it, such as "5m"."""
        milliseconds = round(seconds * self.scale * 1000)
        return next(
            f"{milliseconds // size}{unit}" for size, unit in _UNITS if not milliseconds % size
        )

    def seconds(self, seconds: float) -> str:
        """Return a number of seconds, to compare with differences of timestamps."""
        return f"{seconds * self.scale:g}"

    @property
    def short(self) -> str:
        """The range of 5 minutes: short enough to show a change soon."""
        return self.duration(SHORT_SECONDS)

    @property
    def long(self) -> str:
        """The range of 30 minutes: long enough that a short disturbance has little effect."""
        return self.duration(LONG_SECONDS)

    @property
    def hour(self) -> str:
        """The range of an hour: what is usual for figures that change as training proceeds."""
        return self.duration(HOUR)

    @property
    def history(self) -> str:
        """The range of 6 hours: what is usual in a run, and how long its end is remembered."""
        return self.duration(6 * HOUR)

    @property
    def week(self) -> str:
        """The range of 7 days: longer than three times the interval between checkpoints."""
        return self.duration(7 * 24 * HOUR)

    @property
    def evaluation(self) -> str:
        """The interval between two evaluations of the rules."""
        scaled = _EVALUATION_SECONDS * self.scale
        return Timing().duration(max(_LEAST_EVALUATION_SECONDS, scaled))
