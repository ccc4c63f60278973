"""Writes the report of a run as Markdown, for a comment on a change or a ticket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..common.format_numbers import UNKNOWN, format_bytes, format_seconds
from ..common.plain_text import printable
from .report_page import (
    CAUSE_TEXTS,
    NOT_RECORDED,
    STATUS_TEXTS,
    facts_of,
    gain_text,
    headline_figures,
    phase_text,
    without_decisions,
)
from .run_summary import RankRow, RunSummary, percent

MAX_RANKS = 64
MAX_DECISIONS = 20


def report_markdown(summary: RunSummary) -> str:
    """Return the report as Markdown."""
    return "\n".join(_lines(summary)) + "\n"


def _lines(summary: RunSummary) -> Iterator[str]:
    yield f"## {plain(summary.run_id)}: {STATUS_TEXTS[summary.status][0]}"
    yield from ("", f"**{plain(summary.verdict)}**", "", plain(" · ".join(facts_of(summary))), "")
    yield from markdown_table(
        ("figure", "value"), [(name, text) for name, _, text in headline_figures(summary)]
    )
    if summary.findings:
        yield from ("", "### What to do next", "")
        for number, finding in enumerate(summary.findings, 1):
            yield f"{number}. **{plain(finding.sentence)}** {plain(finding.advice)}"
    yield from ("", "### Where the time went", "")
    yield from markdown_table(
        ("phase", "share of training time", "per step"),
        [
            (phase_text(s), percent(s.ratio), format_seconds(s.seconds_per_step))
            for s in summary.phases
        ],
    )
    yield from ("", "### Why communication was waited for", "")
    yield from markdown_table(
        ("cause", "share of training time", "per step"),
        [
            (CAUSE_TEXTS[s.name], percent(s.ratio), format_seconds(s.seconds_per_step))
            for s in summary.causes
        ],
    )
    yield from ("", "### Memory", "")
    yield from markdown_table(
        ("device", "rank", "peak", "limit", "risk", "largest categories"),
        [
            (
                each.device,
                str(each.rank),
                format_bytes(each.peak_bytes),
                format_bytes(each.limit_bytes),
                percent(each.highest_risk_ratio),
                ", ".join(
                    f"{name} {format_bytes(size)}" for name, size in [*each.categories.items()][:3]
                )
                or NOT_RECORDED,
            )
            for each in summary.memory
        ],
    )
    yield from ("", "### Ranks", "")
    yield from markdown_table(
        ("rank", "host", "steps", "step time", "exposed", "peak memory", "behind the median rank"),
        [
            (
                str(row.rank),
                row.host,
                str(row.steps),
                format_seconds(row.step_seconds),
                percent(row.exposed_ratio),
                percent(row.memory_peak_ratio),
                behind_median(row),
            )
            for row in summary.ranks[:MAX_RANKS]
        ],
    )
    if len(summary.ranks) > MAX_RANKS:
        yield f"\n{len(summary.ranks) - MAX_RANKS} more ranks are in the JSON report."
    yield from (f"\n{note}" for note in summary.notes)
    yield from ("", "### Tuner", "")
    if not summary.tuner.decisions:
        yield plain(without_decisions(summary))
    else:
        yield from markdown_table(
            ("step", "change", "verdict", "gain"),
            [
                (str(each.step), each.change, each.verdict, gain_text(each))
                for each in summary.tuner.decisions[-MAX_DECISIONS:]
            ],
        )
    if summary.incidents:
        yield from ("", "### Errors and hangs", "")
        for incident in summary.incidents:
            yield f"- {plain(incident.path)}: {plain(incident.headline)}"
    yield from ("", f"Monitoring took {percent(summary.monitoring.ratio)} of the ranks' time.")
    if summary.problems:
        yield from ("", "### What is missing", "")
        yield from (f"- {plain(problem)}" for problem in summary.problems)


def behind_median(row: RankRow) -> str:
    """Return by what share of a step a rank is behind the median rank, such as "+4.1 % in data"."""
    if row.straggler_score is None:
        return UNKNOWN
    return f"{100 * row.straggler_score:+.1f} % in {row.straggler_phase}"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Yield the lines of a table; without rows, that nothing was recorded."""
    if not rows:
        return [f"{NOT_RECORDED[0].upper()}{NOT_RECORDED[1:]}."]
    return [
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
        *(f"| {' | '.join(map(plain, row))} |" for row in rows),
    ]


def plain(text: str) -> str:
    """Escape what Markdown or HTML would read as markup."""
    text = printable(text).replace("&", "&amp;").replace("<", "&lt;")
    for sign in "\\`*_|[]":
        text = text.replace(sign, f"\\{sign}")
    return text
