"""Defines the kinds of panel as plain data, with their queries, units and thresholds.

`panel_json.py` converts them to the JSON that Grafana reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# Grafana's names of units.
RATIO = "percentunit"  # a ratio; 1 is shown as 100 %
SECONDS = "s"
BYTES = "bytes"  # shown as KiB, MiB and so on
BYTES_PER_SECOND = "binBps"
COUNT = "short"  # large numbers are shortened: 12.3 K
FLOPS_PER_SECOND = "flops"
WATTS = "watt"
CELSIUS = "celsius"
HERTZ = "hertz"
PLAIN = "none"  # numbers are shown as they are
DAYS_AND_HOURS = "dtdurations"  # seconds as "1 day, 2 hours"
HOURS_AND_MINUTES = "dthms"  # seconds as "26:04:05"
MOMENT = "dateTimeAsIso"  # milliseconds since 1970 as a date

# The colors of values.
GOOD = "green"
WARNING = "orange"
BAD = "red"
NEUTRAL = "text"


@dataclass(frozen=True, slots=True)
class Step:
    """A color and the lowest value that has it; None as the value is minus infinity."""

    color: str
    value: float | None = None


def above(limit: float, worse: float | None = None) -> tuple[Step, ...]:
    """Return the colors of a value that should be low.

    Green below `limit`, red from `limit` on. If `worse` is given: orange from `limit` on, red from
    `worse` on.
    """
    if worse is None:
        return (Step(GOOD), Step(BAD, limit))
    return (Step(GOOD), Step(WARNING, limit), Step(BAD, worse))


def below(limit: float, worse: float | None = None) -> tuple[Step, ...]:
    """Return the colors of a value that should be high.

    Green from `limit` on, red below. If `worse` is given: orange below `limit`, red below `worse`.
    """
    if worse is None:
        return (Step(BAD), Step(GOOD, limit))
    return (Step(BAD), Step(WARNING, worse), Step(GOOD, limit))


PLAIN_TEXT = (Step(NEUTRAL),)  # for a value that is neither good nor bad
ANY_IS_BAD = above(1)  # for a count that should stay 0


@dataclass(frozen=True, slots=True)
class Named:
    """A text and a color that are shown in place of a value."""

    value: int
    text: str
    color: str


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression of a panel.

    Attributes:
        expression: PromQL, with Grafana's variables.
        legend: The name of each series, such as "rank {{rank}}". A name without a label fits an
            expression with one series only.
        shape: "series" for values over the time range, "now" for the current value of each
            series, "buckets" for the buckets of a histogram by their label `le`.
        exemplars: Whether to draw the exemplars, points that link to traces.
        is_limit: Whether a graph draws the series as a dashed red line.
    """

    expression: str
    legend: str
    shape: Literal["series", "now", "buckets"] = "series"
    exemplars: bool = False
    is_limit: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """A link that a click on a series, a cell or a row offers.

    Attributes:
        title: What the link leads to.
        url: The address, with Grafana's variables such as `${__field.labels.rank}`.
    """

    title: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """The fields that all kinds of panel have.

    Attributes:
        title: The title.
        description: How to read the panel and what to do, in markdown. Grafana shows it at the (i)
            next to the title.
        queries: The queries whose results the panel shows.
        unit: One of the units at the top of this module.
        width: Width in columns; a dashboard has 24.
        height: Height in rows of about 38 pixels.
        thresholds: Colors by value, the lowest first. A time series draws the values as lines.
        minimum: Lower end of the scale; None fits it to the values.
        maximum: Upper end of the scale; None fits it to the values.
        decimals: Digits after the decimal point; None lets Grafana choose.
        colors: Fixed colors of series, by their legend.
        units: Units of single series, by their legend, where they differ from `unit`.
        empty: The text shown if there is no data; in a table also in each empty cell.
        dashboard: The uid of a dashboard with details, to which the title links.
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
    units: Mapping[str, str] = field(default_factory=dict)
    empty: str = ""
    dashboard: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSeries(Panel):
    """A graph of values over time.

    Attributes:
        stacked: Whether to stack the series, as parts of a whole.
        log_scale: Whether the scale is logarithmic, for values that differ by orders of magnitude.
    """

    stacked: bool = False
    log_scale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat(Panel):
    """A large figure for each series.

    Attributes:
        plain: Whether to leave out the small graph behind the figure.
        named: Texts shown in place of values.
        color: What takes the color of the threshold: the figure, the background or nothing.
    """

    plain: bool = False
    named: tuple[Named, ...] = ()
    color: Literal["value", "background", "none"] = "value"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(Panel):
    """A dial for each series, from `minimum` to `maximum`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarGauge(Panel):
    """A horizontal bar for each series, with its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heatmap(Panel):
    """A heatmap of a histogram over time; `unit` is the unit of the bucket bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesHeatmap(Panel):
    """A row of cells over time for each series, colored by its value.

    It shows a thousand ranks at once, where a graph of as many lines shows none. Grafana sorts the
    rows as Prometheus does, by the labels in alphabetical order: with the labels node and rank, the
    ranks of a node are neighbors.

    Attributes:
        low_is_bad: Whether low values have the conspicuous colors, instead of high ones.
        max_points: The most cells of a row.
    """

    low_is_bad: bool = False
    max_points: int = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A curve of an `XYChart`.

    Attributes:
        name: The name in the legend.
        x: PromQL of one series, the values on the horizontal axis.
        y: PromQL of one series, the values on the vertical axis at the same times.
        color: The color of the curve.
    """

    name: str
    x: str
    y: str
    color: str


@dataclass(frozen=True, slots=True, kw_only=True)
class XYChart(Panel):
    """Curves over a value other than time.

    Attributes:
        curves: The curves, of which each brings its own two queries.
        x_title: The title of the horizontal axis.
    """

    curves: tuple[Curve, ...]
    x_title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTimeline(Panel):
    """A horizontal band over time for each series, colored by its value.

    Attributes:
        named: The text and color of each value.
    """

    named: tuple[Named, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of values in a table.

    Attributes:
        title: The heading of the column.
        expression: PromQL that gives one value for each row.
        unit: The unit of the values.
        thresholds: Colors of the values, the lowest first.
        decimals: Digits after the decimal point; None lets Grafana choose.
        named: Texts shown in place of values.
        bar_until: If not 0: a bar from 0 to this value is drawn next to the value.
    """

    title: str
    expression: str
    unit: str = COUNT
    thresholds: tuple[Step, ...] = ()
    decimals: int | None = None
    named: tuple[Named, ...] = ()
    bar_until: float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Panel):
    """A table with a row for each combination of label values.

    Attributes:
        labels: The heading of each label's column, by label. Every column's expression must be
            aggregated by job, run and these labels. The labels job and run have no column unless
            they are named here.
        columns: The columns of values. A single column without a title is not shown.
        sort_by: The heading of the column by which rows are sorted, largest value first.
        ascending: Whether the smallest value is first instead.
        after: The headings of label columns that stand to the right of the values.
        lower_case: The headings of label columns that are written in lower case.
        widths: The widths of columns in pixels, by heading; the others share the rest.
    """

    labels: Mapping[str, str]
    columns: tuple[Column, ...]
    sort_by: str = ""
    ascending: bool = False
    after: tuple[str, ...] = ()
    lower_case: tuple[str, ...] = ()
    widths: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Panel):
    """Static markdown, without a query."""

    content: str
