"""Defines a dashboard as plain data: rows of panels, each row under a heading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .panels import Panel

PREFIX = "zerowatch-"


@dataclass(frozen=True, slots=True)
class Row:
    """A heading and its panels, placed from left to right in lines of 24 columns.

    Attributes:
        title: The heading.
        panels: The panels.
        collapsed: Whether the panels are hidden until the heading is clicked. Until then Grafana
            sends none of their queries.
    """

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """Rows of panels that answer one question.

    Attributes:
        name: The name of its module, from which its uid is derived.
        title: The title that Grafana shows.
        description: The question that the dashboard answers.
        rows: The headings and panels, from top to bottom.
        span: The length of the time range when the dashboard is opened, such as "1h".
        traces: TraceQL searches to which the dashboard links.
        about: What is chosen at the top: one run, all runs of some jobs, or two runs to compare. A
            node and a rank of one run can be chosen if a query uses the choice.
        refresh: The time between two updates.
    """

    name: str
    title: str
    description: str
    rows: tuple[Row, ...]
    span: str = "30m"
    traces: tuple[str, ...] = ()
    about: Literal["run", "runs", "two runs"] = "run"
    refresh: str = "15s"

    @property
    def uid(self) -> str:
        """The id by which links and Grafana's provisioning identify the dashboard."""
        return uid_of(self.name)

    def panels(self) -> Iterator[Panel]:
        """Yield all panels, from the first row to the last."""
        for row in self.rows:
            yield from row.panels


def uid_of(name: str) -> str:
    """Return the uid of a dashboard, given the name of its module, such as "step_anatomy"."""
    return PREFIX + name.replace("_", "-")
