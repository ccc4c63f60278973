"""How a value looks: its unit, and the colours it takes from which value on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Grafana's names of units.
RATIO = "percentunit"  # 1 is 100 %
SECONDS = "s"
BYTES = "bytes"  # KiB, MiB, ...
BYTES_PER_SECOND = "binBps"
COUNT = "short"
FLOPS_PER_SECOND = "flops"
WATTS = "watt"
CELSIUS = "celsius"
HERTZ = "hertz"
PLAIN = "none"

GOOD, WATCH_OUT, BAD, NEUTRAL = "green", "orange", "red", "text"


@dataclass(frozen=True, slots=True)
class Step:
    """A colour, and the value from which on it is used; None is the lowest step, without one."""

    color: str
    value: float | None = None


def above(limit: float, worse: float | None = None) -> tuple[Step, ...]:
    """Colour values that should stay low: from `limit` on they are bad, or from `worse` on."""
    if worse is None:
        return (Step(GOOD), Step(BAD, limit))
    return (Step(GOOD), Step(WATCH_OUT, limit), Step(BAD, worse))


def below(limit: float, worse: float | None = None) -> tuple[Step, ...]:
    """Colour values that should stay high: under `limit` they are bad, or under `worse`."""
    if worse is None:
        return (Step(BAD), Step(GOOD, limit))
    return (Step(BAD), Step(WATCH_OUT, worse), Step(GOOD, limit))


PLAIN_TEXT = (Step(NEUTRAL),)  # a value that is neither good nor bad
ANY_IS_BAD = above(1)  # of a count


@dataclass(frozen=True, slots=True)
class Named:
    """A word shown in place of a value, and its colour."""

    value: int
    text: str
    color: str


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression of a panel.

    Attributes:
        expression: PromQL, with Grafana's variables.
        legend: The series' name, such as "rank {{rank}}"; with no label in it, of one series only.
        shape: "series" over time, "now" one value a series, "buckets" a histogram's by `le`.
        exemplars: Whether the points that lead to traces are drawn too.
    """

    expression: str
    legend: str
    shape: Literal["series", "now", "buckets"] = "series"
    exemplars: bool = False
