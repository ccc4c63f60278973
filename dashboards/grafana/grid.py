"""Positions of panels: 24 columns, filled from left to right, without overlap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .panels import Panel

COLUMNS = 24
HEADING_HEIGHT = 1


@dataclass(frozen=True, slots=True)
class Place:
    """A rectangle, in columns and rows from the dashboard's upper left corner."""

    left: int
    top: int
    width: int
    height: int


def places(panels: Sequence[Panel], top: int) -> Iterator[Place]:
    """Yield each panel's place below `top`; a panel that no longer fits begins a new line.

    Raises:
        ValueError: A panel is wider than the dashboard.
    """
    left = line_height = 0
    for panel in panels:
        if not 0 < panel.width <= COLUMNS:
            raise ValueError(
                f"panel {panel.title!r}: width {panel.width}, allowed is 1 to {COLUMNS}"
            )
        if left + panel.width > COLUMNS:
            left, top, line_height = 0, top + line_height, 0
        yield Place(left, top, panel.width, panel.height)
        left += panel.width
        line_height = max(line_height, panel.height)
