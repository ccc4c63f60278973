"""Writes the parts of an HTML page that needs neither a network nor other files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path

import orjson

from .run_charts import Chart
from .run_summary import percent

ASSETS = Path(__file__).parent / "assets"
# The page loads nothing and sends nothing, even if a name in the run folder tries to.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


class Html(str):
    """Text that is HTML already. All other text is escaped."""


def document(title: str, body: str, charts: Sequence[Chart]) -> str:
    """Return a whole page.

    Args:
        title: Its title, as plain text.
        body: Its content, as HTML.
        charts: The charts whose places are in the content.
    """
    body = body.replace(" %", "\N{NO-BREAK SPACE}%")
    data = orjson.dumps(charts).decode().replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>"
        f"<style>{asset('uPlot.min.css')}\n{asset('report.css')}</style></head>"
        f"<body><main>{body}</main>"
        f'<script type="application/json" id="charts">{data}</script>'
        f"<script>{asset('uPlot.iife.min.js')}</script><script>{asset('report.js')}</script>"
        "</body></html>\n"
    )


@cache
def asset(name: str) -> str:
    """Return the text of a file in `assets/`, such as "uPlot.iife.min.js"."""
    return (ASSETS / name).read_text(encoding="utf-8")


def _text(value: object) -> str:
    return value if isinstance(value, Html) else escape(str(value))


def section(title: str, *parts: str) -> str:
    """Return a section; its id is the title in lower case with dashes."""
    name = title.lower().replace(" ", "-")
    return f'<section id="{name}"><h2>{escape(title)}</h2>{"".join(parts)}</section>'


def chart_places(drawn: Mapping[str, Chart], *names: str) -> str:
    """Return the places of charts, in which the script draws them."""
    places = "".join(
        f'<div><h3>{escape(chart.title)}</h3><p class="note">{escape(chart.note)}</p>'
        f'<div class="chart" id="chart-{chart.name}" role="img" '
        f'aria-label="{escape(chart.title)} over steps"></div></div>'
        for name in names
        if (chart := drawn.get(name)) is not None
    )
    return f'<div class="charts">{places}</div>' if places else ""


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph with a class of the style sheet."""
    return f'<p class="{kind}">{_text(text)}</p>'


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], *, kind: str = "") -> str:
    """Return a table; nothing without rows. A cell that is a pair has a value and its text."""
    if not rows:
        return ""
    sides = [" class='left'" if isinstance(cell, Html) else "" for cell in rows[0]]
    head = "".join(
        f'<th scope="col"{side}>{escape(each)}</th>'
        for each, side in zip(heads, sides, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(value: object) -> str:
    if isinstance(value, tuple):
        key, text = value
        return f'<td data-value="{"" if key is None else key}">{_text(text)}</td>'
    kind = ' class="wrap"' if isinstance(value, Html) else ""
    return f"<td{kind}>{_text(value)}</td>"


def swatch(color: int) -> str:
    """Return a square in a color of the page, from 1 to NUM_COLORS."""
    return f'<span class="swatch" style="background:var(--c{color})"></span>'


def bar(shares: Sequence[tuple[str, float, int]]) -> str:
    """Return a bar of parts: name, share of the bar, color."""
    parts = "".join(
        f'<i style="width:{100 * share:.2f}%;background:var(--c{color})" '
        f'title="{escape(name)} {percent(share)}"></i>'
        for name, share, color in shares
        if share > 0
    )
    return f'<div class="bar">{parts}</div>'
