"""Prints the results of a bench as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HEADINGS = ("what", "measured", "interval or spread", "goal", "met")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; `met` is None without a goal, or if noise exceeds the margin."""

    what: str
    measured: str
    spread: str = ""
    goal: str = ""
    met: bool | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.what, self.measured, self.spread, self.goal, self._verdict)

    @property
    def too_noisy(self) -> bool:
        return bool(self.goal) and self.met is None

    @property
    def _verdict(self) -> str:
        if not self.goal:
            return ""
        return "too noisy" if self.met is None else ("yes" if self.met else "NO")


def render(rows: Sequence[Row]) -> str:
    """Lay rows out as a Markdown table that also reads well on a terminal."""
    lines = [HEADINGS, *(row.cells for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    shown = [_line(line, widths) for line in lines]
    shown.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(shown)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "| " + " | ".join(padded) + " |"
