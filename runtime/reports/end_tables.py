"""Shows on a terminal where the time of a run went, what to try next, and what is missing.

The end of a run shows this in short; `zerowatch report` adds the ranks and errors, and lists all.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...metrics.catalog.labels import NON_TRAINING_PHASES
from ..common.format_numbers import format_seconds
from ..common.plain_text import encodable, write_if_open
from .report_markdown import behind_median
from .report_page import (
    CAUSE_TEXTS,
    facts_of,
    headline_figures,
    phase_text,
    without_decisions,
)
from .run_summary import RankRow, RunSummary, percent

# Width in a log file, and the largest on a terminal.
PLAIN_WIDTH = 100
# Findings, and lines on what is missing, at the end of a run.
MAX_LINES = 3
# Ranks that are shown, of a run with more.
MAX_RANKS = 16
# Phases and causes below this share of training time are left out.
MIN_RATIO = 0.0005


def print_end_tables(summary: RunSummary, stream: TextIO, *, is_whole: bool = False) -> None:
    """Print the tables at the end of a run; in color only on a terminal.

    Args:
        summary: The figures of the run.
        stream: Such as `sys.stderr`. If it is closed or its disk is full, nothing is printed.
        is_whole: Whether to print all findings and all that is missing, and the ranks and errors.

    Examples:
        >>> print_end_tables(summary_of(Path("runs/20261123T005552-c44904")), sys.stderr)
    """
    is_terminal = not stream.closed and stream.isatty()
    width = min(PLAIN_WIDTH, shutil.get_terminal_size().columns) if is_terminal else PLAIN_WIDTH
    text = io.StringIO()
    Console(file=text, width=width, force_terminal=is_terminal, highlight=False).print(
        end_tables(summary, is_whole=is_whole)
    )
    # A table pads its cells, which would leave spaces at the ends of lines in log files.
    lines = "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())
    write_if_open(stream, encodable(lines, stream))


def end_tables(summary: RunSummary, *, is_whole: bool = False) -> RenderableType:
    """Return the verdict, where the time went, the headline figures and what to try next.

    Args:
        summary: The figures of the run.
        is_whole: As for `print_end_tables`.
    """
    parts: list[RenderableType] = [
        Text(),
        Text(summary.verdict, style="bold"),
        Text(" · ".join(facts_of(summary)), style="dim"),
    ]
    if summary.phases:
        parts.append(_time_table(summary))
    parts.append(_figures_table(summary))
    if is_whole and summary.ranks:
        parts += _ranks(summary)
    if summary.tuner.mode == "auto":
        parts.append(Text(f"\n{_tuner(summary)}"))
    if summary.findings:
        shown = len(summary.findings) if is_whole else MAX_LINES
        parts += [Text("\nWhat to try next", style="bold"), *_findings(summary, shown)]
    if is_whole:
        incidents = [f"{incident.path}: {incident.headline}" for incident in summary.incidents]
        parts += _list("Errors and hangs", incidents)
    parts += _list("What is missing", summary.problems, None if is_whole else MAX_LINES)
    return Group(*parts)


def _time_table(summary: RunSummary) -> Table:
    table = Table(
        title="Where the time went",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        title_style="bold",
    )
    table.add_column("mean of the ranks")
    table.add_column("per step", justify="right")
    table.add_column("share", justify="right")
    was_training = True
    for share in (share for share in summary.phases if share.ratio >= MIN_RATIO):
        is_training = share.name not in NON_TRAINING_PHASES
        if was_training and not is_training:
            table.add_section()
        was_training = is_training
        name = phase_text(share)
        table.add_row(name, format_seconds(share.seconds_per_step), percent(share.ratio))
    figures = summary.figures
    exposed, step_seconds = figures["comm_exposed_ratio"], figures["step_seconds"]
    if exposed is None:
        return table
    table.add_section()
    if (comm := figures["comm_ratio"]) is not None:
        limit = " (at most)" if summary.is_upper_bound else ""
        # Its ratio is of wall time, because it contains that of evaluation and checkpoints.
        per_step = _part_of(_wall_seconds_per_step(summary), comm)
        table.add_row(f"of which communication{limit}", per_step, percent(comm))
    table.add_row(
        "of which training waited for it", _part_of(step_seconds, exposed), percent(exposed)
    )
    for cause in summary.causes:
        if cause.ratio >= MIN_RATIO:
            table.add_row(
                f"  {CAUSE_TEXTS[cause.name]}",
                format_seconds(cause.seconds_per_step),
                percent(cause.ratio),
                style="dim",
            )
        if cause.name == "imbalance" and (bubble := figures["pipeline_bubble_ratio"]) is not None:
            name = "    of it the bubble: for another pipeline stage"
            table.add_row(name, _part_of(step_seconds, bubble), percent(bubble), style="dim")
    return table


def _wall_seconds_per_step(summary: RunSummary) -> float | None:
    """Return the mean time of a step over the ranks, with evaluation and checkpoints."""
    return sum(share.seconds_per_step for share in summary.phases) or None


def _part_of(seconds: float | None, ratio: float) -> str:
    return format_seconds(None if seconds is None else seconds * ratio)


def _figures_table(summary: RunSummary) -> Table:
    """Return the headline figures that were recorded, two in a row."""
    table = Table.grid(padding=(0, 2))
    known = [(title, text) for title, _, text in headline_figures(summary)]
    for at in range(0, len(known), 2):
        row = [cell for title, text in known[at : at + 2] for cell in (Text(title, "bold"), text)]
        table.add_row(*row)
    return table


def _ranks(summary: RunSummary) -> Iterator[RenderableType]:
    """Yield the table of ranks, or of the slowest ones.

    Other ranks wait for the slowest one, which waits least itself. Most ranks of a large job have
    no score.
    """

    def slowest_first(row: RankRow) -> tuple[float, float]:
        return -(
            row.straggler_score or 0.0
        ), 1.0 if row.exposed_ratio is None else row.exposed_ratio

    slowest = sorted(summary.ranks, key=slowest_first)[:MAX_RANKS]
    has_hosts = len({row.host for row in summary.ranks}) > 1
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    heads = ("host", "steps", "step time", "waited", "data", "memory", "behind the median rank")
    for head in ("rank", *heads[0 if has_hosts else 1 :]):
        table.add_column(head, justify="left" if head in ("host", heads[-1]) else "right")
    for row in sorted(slowest, key=lambda row: row.rank):
        table.add_row(
            str(row.rank),
            *([row.host] if has_hosts else []),
            f"{row.steps:,}",
            format_seconds(row.step_seconds),
            percent(row.exposed_ratio),
            percent(row.data_ratio),
            percent(row.memory_peak_ratio),
            behind_median(row),
        )
    yield Text("\nRanks", style="bold")
    yield table
    if len(summary.ranks) > MAX_RANKS:
        text = f"{MAX_RANKS} of {len(summary.ranks):,} ranks"
        if all(row.straggler_score is not None for row in summary.ranks):
            text = f"the slowest {text}"
        else:
            text += ": those known to be behind the median rank, and those that waited least"
        yield Text(f"  {text}", style="dim")
    for note in summary.notes:
        yield Padding(Text(note, style="dim"), (0, 0, 0, 2))


def _list(
    title: str, lines: Sequence[str], num_shown: int | None = None
) -> Iterator[RenderableType]:
    if lines:
        yield Text(f"\n{title}", style="bold")
        yield from (Padding(Text(f"- {line}"), (0, 0, 0, 2)) for line in lines[:num_shown])
        yield from _more(len(lines), num_shown)


def _tuner(summary: RunSummary) -> str:
    decisions = summary.tuner.decisions
    if not decisions:
        return without_decisions(summary)
    accepted = sum(decision.verdict == "accepted" for decision in decisions)
    return f"The tuner kept {accepted} of {len(decisions)} changes; see decisions.jsonl."


def _findings(summary: RunSummary, num_shown: int) -> Iterator[RenderableType]:
    shown = summary.findings[:num_shown]
    for number, finding in enumerate(shown, 1):
        text = Text(f"{number}. ")
        # The verdict has the sentence of the first finding.
        if finding.sentence not in summary.verdict:
            text.append(f"{finding.sentence} ")
        yield Padding(text.append(finding.advice), (0, 0, 0, 2))
    yield from _more(len(summary.findings), num_shown)


def _more(num: int, num_shown: int | None) -> Iterator[RenderableType]:
    if num_shown is not None and num > num_shown:
        yield Text(f"  {num - num_shown} more in the report.", style="dim")
