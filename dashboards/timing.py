"""The PromQL ranges and intervals of rules; tests scale them by one factor."""

from __future__ import annotations

from dataclasses import dataclass

MINUTE = 60.0
SHORT_SECONDS = 5 * MINUTE
LONG_SECONDS = 30 * MINUTE
_EVALUATION_SECONDS = 15.0
_LEAST_EVALUATION_SECONDS = 1.0
_UNITS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1000, "s"), (1, "ms"))


@dataclass(frozen=True, slots=True)
class Timing:
    """Turns seconds into Prometheus' durations, multiplied by `scale`.

    Args:
        scale: 1 in what is shipped. A test takes 1/30, say, and waits ten seconds where a user
            waits five minutes, for the very same rules.
    """

    scale: float = 1.0

    def duration(self, seconds: float) -> str:
        """Write a duration in the largest unit that divides it, such as "5m"."""
        milliseconds = round(seconds * self.scale * 1000)
        return next(
            f"{milliseconds // size}{unit}" for size, unit in _UNITS if not milliseconds % size
        )

    @property
    def short(self) -> str:
        """The short range, which reacts quickly; rule names call it 5m."""
        return self.duration(SHORT_SECONDS)

    @property
    def long(self) -> str:
        """The long range, which excludes short disturbances; rule names call it 30m."""
        return self.duration(LONG_SECONDS)

    @property
    def evaluation(self) -> str:
        """The time between two evaluations of the rules."""
        scaled = _EVALUATION_SECONDS * self.scale
        return Timing().duration(max(_LEAST_EVALUATION_SECONDS, scaled))
