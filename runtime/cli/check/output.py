"""Prints what the checks have found: as a table, or as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from textwrap import wrap
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .verdicts import SEVERITY, Finding, Verdict

_PLAIN_WIDTH = 98
_LEAST_WIDTH = 40  # of a finding
_UNLIMITED_WIDTH = 10_000
_STYLES = {
    Verdict.OK: "green",
    Verdict.WARNING: "yellow",
    Verdict.FAILED: "bold red",
    Verdict.NOT_APPLICABLE: "dim",
}


def as_json(findings: Sequence[Finding], title: str, code: int) -> str:
    """Return one JSON object with all findings."""
    worst = max((each.verdict for each in findings), key=SEVERITY.__getitem__, default=Verdict.OK)
    return json.dumps(
        {
            "title": title,
            "verdict": worst.value,
            "exit_code": code,
            "findings": [each.as_json() for each in findings],
        },
        indent=2,
    )


def print_findings(findings: Sequence[Finding], title: str, file: TextIO) -> None:
    """Print a table: with colors on a terminal, as plain aligned text elsewhere.

    In plain text the advice is not folded, so that a command in it can be copied from a log.
    """
    if file.isatty():
        _print(Console(file=file, highlight=False), box.SIMPLE_HEAD, findings, title)
        return
    plain = StringIO()
    console = Console(file=plain, width=_UNLIMITED_WIDTH, highlight=False)
    width = _width_left(findings)
    _print(console, None, [_folded(each, width) for each in findings], title)
    file.writelines(f"{line.rstrip()}\n" for line in plain.getvalue().splitlines())


def _folded(finding: Finding, width: int) -> Finding:
    """Fold the text between words; a path remains in one piece."""
    lines = wrap(finding.text, width, break_long_words=False, break_on_hyphens=False)
    return replace(finding, text="\n".join(lines))


def _width_left(findings: Sequence[Finding]) -> int:
    """Return the width that the columns before a finding leave of the line."""
    columns = list(zip(*((each.verdict, each.check, each.where) for each in findings), strict=True))
    shown = columns if _are_several(findings) else columns[:2]
    return max(_LEAST_WIDTH, _PLAIN_WIDTH - sum(max(map(len, column)) + 2 for column in shown))


def _are_several(findings: Sequence[Finding]) -> bool:
    return len({each.where for each in findings if each.where}) > 1


def _print(
    console: Console, frame: box.Box | None, findings: Sequence[Finding], title: str
) -> None:
    several = _are_several(findings)
    table = Table(box=frame, pad_edge=False, header_style="bold")
    for name in ("verdict", "check", "where") if several else ("verdict", "check"):
        table.add_column(name, no_wrap=name != "where")
    table.add_column("finding", overflow="fold")
    before = ""
    for each in findings:
        text = Text(each.text)
        if each.advice:
            text.append(f"\nto do: {each.advice}", style="bold")
        cells = [Text(each.verdict.value, style=_STYLES[each.verdict])]
        cells.append(Text(each.check if each.check != before else ""))
        before = each.check
        if several:
            cells.append(Text(each.where))
        table.add_row(*cells, text)
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print()
    console.print(table)
    console.print()
    console.print(Text(_summary(findings), style="bold"), soft_wrap=True)


def _summary(findings: Sequence[Finding]) -> str:
    counts = Counter(each.verdict for each in findings)
    words = {
        Verdict.FAILED: "failed",
        Verdict.WARNING: "warnings" if counts[Verdict.WARNING] != 1 else "warning",
        Verdict.OK: "ok",
        Verdict.NOT_APPLICABLE: "not applicable",
    }
    return ", ".join(f"{counts[verdict]} {word}" for verdict, word in words.items())
