"""Writes the comparison of two runs as a table for a terminal, and as Markdown."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..common.format_numbers import UNKNOWN, format_bytes, format_seconds
from .report_markdown import markdown_table, plain
from .report_page import facts_of
from .run_comparison import Group, Measure, RunComparison, Unit
from .run_summary import percent

# Width in a file or a pipe.
PLAIN_WIDTH = 110
TITLES: dict[Group, str] = {
    "throughput": "Throughput",
    "phases": "Phases, per step",
    "communication": "Communication, per step",
    "collectives": "Collectives, per step and rank",
    "memory": "Memory",
    "loss": "Loss",
}
HEADS = ("A", "B", "change of B", "interval", "significant")
DIFFERENCE_HEADS = ("from", "name", "A", "B")
# On a terminal, values that are equal in both runs are left out of these groups.
_GROUPS_WITHOUT_EQUALS: tuple[Group, ...] = ("communication", "collectives", "memory", "loss")


def comparison_text(comparison: RunComparison, *, width: int | None = None) -> str:
    """Return the comparison as tables for a terminal.

    Args:
        comparison: The comparison.
        width: Columns of the terminal, on which text is colored; None for plain text.
    """
    text = io.StringIO()
    console = Console(
        file=text, width=width or PLAIN_WIDTH, force_terminal=width is not None, highlight=False
    )
    for part in _parts(comparison):
        console.print(part)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _parts(comparison: RunComparison) -> Iterator[RenderableType]:
    for line in run_lines(comparison):
        yield Text(line, style="dim")
    yield Text()
    yield Text(comparison.verdict, style="bold")
    for each in comparison.incomparable:
        yield Text(each.sentence, style="yellow")
    for group, title in TITLES.items():
        shown = [
            measure
            for measure in rows_of(comparison, group)
            if group not in _GROUPS_WITHOUT_EQUALS or not _is_equal(measure)
        ]
        if shown:
            yield _table(title, HEADS, [(m.title, *cells(m)) for m in shown], is_first_left=True)
    if comparison.differences:
        rows = [(d.source, d.name, d.a, d.b) for d in comparison.differences]
        yield _table("Configuration", DIFFERENCE_HEADS[1:], rows, is_first_left=False)
    else:
        yield Text("\nNo difference in the recorded configuration.")
    yield Text()
    for note in comparison.notes:
        yield Text(note, style="dim")
    if comparison.problems:
        yield Text("\nWhat is missing", style="bold")
        for problem in comparison.problems:
            yield Text(f"- {problem}")


def _table(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, is_first_left: bool
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    table.add_column(Text(f"\n{title}", style="bold"), overflow="fold")
    for head in heads:
        side = "right" if is_first_left else "left"
        table.add_column(f"\n{head}", justify="right" if side == "right" else "left",
                         overflow="fold")  # fmt: skip
    for row in rows:
        table.add_row(*map(Text, row), style="bold" if row[-1] == "yes" else "")
    return table


def _is_equal(measure: Measure) -> bool:
    return measure.change is not None and measure.change.value == 0


def run_lines(comparison: RunComparison) -> Iterator[str]:
    """Yield what A and B are, one line each."""
    for letter, run in (("A", comparison.a), ("B", comparison.b)):
        yield f"{letter}  {' · '.join([run.run_id, *facts_of(run)])}"


def rows_of(comparison: RunComparison, group: Group) -> list[Measure]:
    """Return the measures of a group of which a value is known."""
    return [m for m in comparison.of(group) if m.a is not None or m.b is not None]


def cells(measure: Measure) -> tuple[str, str, str, str, str]:
    """Return the cells of a measure, as in `HEADS`."""
    significant = ""
    if measure.change is not None and measure.change.is_significant is not None:
        significant = "yes" if measure.change.is_significant else "no"
    return (
        value_text(measure.a, measure.unit),
        value_text(measure.b, measure.unit),
        change_text(measure),
        interval_text(measure),
        significant,
    )


def value_text(value: float | None, unit: Unit) -> str:
    """Return a value with its unit."""
    if value is None:
        return UNKNOWN
    if unit == "seconds":
        return format_seconds(value)
    if unit == "bytes":
        return format_bytes(value)
    if unit == "ratio":
        return percent(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def change_text(measure: Measure) -> str:
    """Return the change of a measure, such as "+4.2 %" or "+12 ms"."""
    change = measure.change
    if change is None:
        return "not comparable" if measure.not_comparable else UNKNOWN
    if change.value == 0:
        return "equal"
    return _signed(change.value, measure.unit, is_relative=change.is_relative)


def interval_text(measure: Measure) -> str:
    """Return the interval of a change, such as "+3.1 to +5.3 %"; empty without one."""
    change = measure.change
    if change is None or change.lower is None or change.upper is None:
        return ""
    if change.lower == change.upper == 0:
        return "0"
    lower, upper = (
        _signed(bound, measure.unit, is_relative=change.is_relative)
        for bound in (change.lower, change.upper)
    )
    unit = upper.rsplit(" ", 1)[-1]
    return f"{lower.removesuffix(f' {unit}')} to {upper}"


def _signed(value: float, unit: Unit, *, is_relative: bool) -> str:
    if is_relative:
        return f"{100 * value:+.1f} %"
    if unit == "ratio":
        return f"{100 * value:+.2f} points"
    return f"{'-' if value < 0 else '+'}{value_text(abs(value), unit)}"


def comparison_markdown(comparison: RunComparison) -> str:
    """Return the comparison as Markdown, for a comment on a change or a ticket."""
    return "\n".join(_markdown_lines(comparison)) + "\n"


def _markdown_lines(comparison: RunComparison) -> Iterator[str]:
    yield f"## {plain(comparison.a.run_id)} (A) and {plain(comparison.b.run_id)} (B)"
    yield from ("", f"**{plain(comparison.verdict)}**", "")
    yield from (f"- {plain(line)}" for line in run_lines(comparison))
    yield from (f"- {plain(each.sentence)}" for each in comparison.incomparable)
    for group, title in TITLES.items():
        if rows := rows_of(comparison, group):
            yield from ("", f"### {title}", "")
            yield from markdown_table(("", *HEADS), [(m.title, *cells(m)) for m in rows])
    yield from ("", "### Configuration", "")
    if comparison.differences:
        yield from markdown_table(
            DIFFERENCE_HEADS, [(d.source, d.name, d.a, d.b) for d in comparison.differences]
        )
    else:
        yield "No difference in the recorded configuration."
    yield from ("", *(f"- {plain(note)}" for note in comparison.notes))
    if comparison.problems:
        yield from ("", "### What is missing", "")
        yield from (f"- {plain(problem)}" for problem in comparison.problems)
