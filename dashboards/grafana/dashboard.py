"""A dashboard, as data: rows of panels under headings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .panels import Panel

PREFIX = "zerowatch-"


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading, from left to right, that wrap where the dashboard ends."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A page of panels.

    Attributes:
        name: Of its file, and with a prefix its uid.
        description: The question that it answers.
        rows: What it shows.
        span: The time it shows at first, until now, such as "1h".
        traces: TraceQL of the traces it links to.
    """

    name: str
    title: str
    description: str
    rows: tuple[Row, ...]
    span: str = "30m"
    traces: tuple[str, ...] = ()

    @property
    def uid(self) -> str:
        """What links and provisioning call the dashboard."""
        return uid_of(self.name)

    def panels(self) -> Iterator[Panel]:
        """Go over all panels in their order."""
        for row in self.rows:
            yield from row.panels


def uid_of(name: str) -> str:
    """Return the uid of the dashboard in the file of that name, such as "step_anatomy"."""
    return PREFIX + name.replace("_", "-")
