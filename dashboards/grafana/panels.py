"""The kinds of panel as plain data, with their queries, units and thresholds.

`panel_json.py` converts them to the JSON that Grafana reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """What all panels have.

    Attributes:
        description: How to read it and what to do, as markdown; shown at the title's (i).
        unit: One of style.py's.
        width: In columns, of which a dashboard has 24.
        height: In rows of about 38 pixels.
        thresholds: Colours by value, the lowest first; in a time series as lines.
        minimum: Of the scale; None fits it to the values.
        maximum: Of the scale; None fits it to the values.
        decimals: Digits shown after the point; None lets Grafana choose.
        colors: Fixed colours of series by their legend, so that a word has one colour everywhere.
        empty: What is shown where there is no data; in a table also in each empty cell.
        dashboard: The uid of the dashboard with details, linked from the title.
    """

    title: str
    description: str
    queries: tuple[Query, ...] = ()
    unit: str = COUNT
    width: int = 12
    height: int = 8
    thresholds: tuple[Step, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    decimals: int | None = None
    colors: Mapping[str, str] = field(default_factory=dict)
    empty: str = ""
    dashboard: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSeries(Panel):
    """Lines over time; `stacked` for parts of a whole. `log_scale` for values orders apart."""

    stacked: bool = False
    log_scale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat(Panel):
    """A large figure, with its course behind it unless `plain`."""

    plain: bool = False
    named: tuple[Named, ...] = ()
    color: Literal["value", "background", "none"] = "value"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(Panel):
    """A value on a dial, from `minimum` to `maximum`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarGauge(Panel):
    """A bar for each series, with its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heatmap(Panel):
    """How many observations fell into each bucket over time; `unit` is the buckets'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTimeline(Panel):
    """A band for each series, coloured by the `named` value."""

    named: tuple[Named, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table: its head, and how its values look."""

    title: str
    expression: str
    unit: str = COUNT
    thresholds: tuple[Step, ...] = ()
    decimals: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Panel):
    """A line for each combination of `labels`, which every column's expression aggregates by.

    Attributes:
        labels: Head of the column by label, in their order.
        columns: The values; none are shown where there is one column without a title.
        sort_by: The head of the column that the lines are sorted by, largest first.
        least_first: Whether the smallest comes first instead.
    """

    labels: Mapping[str, str]
    columns: tuple[Column, ...]
    sort_by: str = ""
    least_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Panel):
    """A few words, as markdown."""

    content: str
