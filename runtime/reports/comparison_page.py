"""Writes the comparison of two runs as one HTML file, which needs neither a network nor others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape

import numpy as np

from .comparison_text import (
    DIFFERENCE_HEADS,
    HEADS,
    TITLES,
    cells,
    change_text,
    interval_text,
    rows_of,
    run_lines,
    value_text,
)
from .configuration import RunSource
from .page_parts import Html, chart_places, document, paragraph, section, table
from .run_charts import Bins, Chart, Floats, chart_of, divided, per_point
from .run_comparison import Group, Measure, RunComparison
from .run_reader import Column, RankSteps, RecordedRun
from .run_summary import exposed_seconds, shared_work, training_seconds

# The charts of each section.
_CHARTS: Mapping[Group, tuple[str, ...]] = {
    "throughput": ("throughput", "step_seconds"),
    "phases": (),
    "communication": ("exposed",),
    "collectives": (),
    "memory": ("memory",),
    "loss": ("loss",),
}
_CARDS = ("tokens_per_second", "samples_per_second", "steps_per_second", "step_seconds",
          "comm_exposed_seconds", "wire_bytes", "memory_peak.cuda", "memory_peak.cpu",
          "loss")  # fmt: skip
# Size of the drawing of an interval, in pixels.
_WIDTH, _HEIGHT = 140, 14


def comparison_page(comparison: RunComparison, a: RunSource, b: RunSource) -> str:
    """Return the comparison as HTML.

    Args:
        comparison: The comparison.
        a: The reference, of which curves are drawn.
        b: The other run.
    """
    shared = shared_work(a.run, a.metrics) | shared_work(b.run, b.metrics)
    charts = _charts(a.run, b.run, shared)
    drawn = {chart.name: chart for chart in charts}
    sections = [_head(comparison), section("Configuration", _configuration(comparison))]
    for group, title in TITLES.items():
        if rows := rows_of(comparison, group):
            places = chart_places(drawn, *_CHARTS[group])
            sections.append(section(title, _measures(group, rows), places))
    notes = "".join(map(paragraph, comparison.notes))
    sections.append(section("How it was computed", notes))
    if comparison.problems:
        items = "".join(f"<li>{escape(problem)}</li>" for problem in comparison.problems)
        sections.append(section("What is missing", f"<ul>{items}</ul>"))
    title = f"{comparison.a.run_id} and {comparison.b.run_id} - zerowatch compare"
    return document(title, "".join(sections), charts)


def _head(comparison: RunComparison) -> str:
    by_name = {measure.name: measure for measure in comparison.measures}
    cards = "".join(_card(by_name[name]) for name in _CARDS if name in by_name)
    limits = "".join(paragraph(each.sentence, "warning") for each in comparison.incomparable)
    runs = "".join(paragraph(line, "quiet") for line in run_lines(comparison))
    return (
        f'<header><h1>Comparison of two runs</h1><div class="verdict">{escape(comparison.verdict)}'
        f'</div>{limits}{runs}<div class="cards">{cards}</div></header>'
    )


def _card(measure: Measure) -> str:
    if measure.a is None or measure.b is None:
        return ""
    values = f"{value_text(measure.a, measure.unit)} → {value_text(measure.b, measure.unit)}"
    value = "" if measure.change is None else measure.change.value
    return (
        f'<div class="card"><span>{escape(measure.title)}</span>'
        f'<b data-measure="{escape(measure.name)}" data-value="{value}">'
        f"{escape(change_text(measure))}</b>"
        f"<span>{escape(values)}</span></div>"
    )


def _configuration(comparison: RunComparison) -> str:
    if not comparison.differences:
        return paragraph("No difference in the recorded configuration.")
    rows = [
        (each.source, *(Html(escape(text)) for text in (each.name, each.a, each.b)))
        for each in comparison.differences
    ]
    return table(DIFFERENCE_HEADS, rows, kind="wide")


def _measures(group: Group, rows: Sequence[Measure]) -> str:
    scale = _scale(rows)
    lines = [
        (
            Html(escape(measure.title)),
            *((value, text) for value, text in zip((measure.a, measure.b), cells(measure)[:2],
                                                   strict=True)),
            change_text(measure),
            Html(_interval(measure, scale)) if scale else "",
            cells(measure)[-1],
        )
        for measure in rows
    ]  # fmt: skip
    heads = (TITLES[group].split(",")[0].lower(), *HEADS)
    if not scale:
        heads, lines = heads[:-2], [line[:-2] for line in lines]  # type: ignore[assignment]
    return table(heads, lines)


def _scale(rows: Sequence[Measure]) -> float:
    """Return the largest bound in a group; 0 if there is no interval."""
    bounds = [
        abs(bound)
        for measure in rows
        if measure.change is not None
        for bound in (measure.change.lower, measure.change.upper)
        if bound is not None
    ]
    return max(bounds, default=0.0)


def _interval(measure: Measure, scale: float) -> str:
    """Return a drawing of an interval against no change, and its bounds as text."""
    change = measure.change
    if change is None or change.lower is None or change.upper is None:
        return ""
    middle = _WIDTH / 2

    def place(value: float) -> float:
        return middle + value / scale * (middle - 4)

    left, right, color = place(change.lower), place(change.upper), "var(--quiet)"
    if change.is_significant:
        color = "var(--c2)"
    return (
        f'<svg class="interval" width="{_WIDTH}" height="{_HEIGHT}" aria-hidden="true">'
        f'<line x1="{middle}" x2="{middle}" y1="0" y2="{_HEIGHT}" stroke="var(--quiet)"/>'
        f'<rect x="{left:.1f}" y="5" width="{max(1.0, right - left):.1f}" height="4" rx="1" '
        f'fill="{color}" opacity="0.55"/>'
        f'<circle cx="{place(change.value):.1f}" cy="7" r="3.5" fill="{color}"/></svg>'
        f'<span class="bounds">{escape(interval_text(measure))}</span>'
    )


def _charts(a: RecordedRun, b: RecordedRun, shared: Collection[str]) -> tuple[Chart, ...]:
    """Return curves of both runs over all their steps, those of the warm-up included.

    Args:
        a: The reference.
        b: The other run.
        shared: What ranks of A or B share; see `shared_work`.
    """
    bins = Bins([*a.ranks.values(), *b.ranks.values()])

    def curves(of: Callable[[RecordedRun], Floats]) -> dict[str, Floats]:
        return {"A": of(a), "B": of(b)}

    charts = (
        _throughput(a, b, bins, shared),
        chart_of(
            "step_seconds",
            "Time of a step",
            "seconds",
            f"Mean over the ranks.{per_point(bins)}",
            bins.steps,
            curves(lambda run: bins.mean(run, training_seconds)),
        ),
        chart_of(
            "exposed",
            "Exposed communication",
            "ratio",
            f"Share of training time in which training could only wait.{per_point(bins)}",
            bins.steps,
            curves(lambda run: _share(run, bins, exposed_seconds)),
        ),
        chart_of(
            "memory",
            "Memory",
            "ratio",
            f"Highest use of any rank as a share of its limit.{per_point(bins)}",
            bins.steps,
            curves(lambda run: _memory(run, bins)),
        ),
        chart_of(
            "loss",
            "Loss",
            "",
            f"Mean over the ranks.{per_point(bins)}",
            bins.steps,
            curves(lambda run: bins.mean(run, lambda steps: steps.column("loss"))),
        ),
    )
    return tuple(chart for chart in charts if chart is not None and chart.curves)


def _share(run: RecordedRun, bins: Bins, of: Callable[[RankSteps], Column]) -> Floats:
    pairs = bins.ratios(run, of)
    return divided(sum(part for part, _ in pairs), sum(whole for _, whole in pairs))


def _throughput(
    a: RecordedRun, b: RecordedRun, bins: Bins, shared: Collection[str]
) -> Chart | None:
    names = [name for name in ("tokens", "samples") if name not in shared]
    if not names:
        return None
    both = [
        name
        for name in names
        if all(any(steps.total(name) for steps in run.ranks.values()) for run in (a, b))
    ]
    name = (both or names)[0]
    return chart_of(
        "throughput",
        f"{name.capitalize()} per second",
        "per_second",
        f"All ranks together.{per_point(bins)}",
        bins.steps,
        {"A": bins.rate(a, name), "B": bins.rate(b, name)},
    )


def _memory(run: RecordedRun, bins: Bins) -> Floats:
    """Return the highest share of a limit, of GPUs if there are any."""
    shares: dict[bool, list[Floats]] = {}
    for steps in run.ranks.values():
        for name in steps.names("memory"):
            device, state = name.rsplit(".", 1)
            if state == "limit":
                peak = f"memory.{device}.peak_allocated"
                used = steps.column(peak if peak in steps.columns else f"memory.{device}.allocated")
                share = bins.highest(steps, used / steps.column(f"memory.{name}"))
                shares.setdefault(device != "cpu", []).append(share)
    found = shares.get(True) or shares.get(False) or [np.full(len(bins.steps), np.nan)]
    highest: Floats = np.fmax.reduce(np.stack(found), axis=0)
    return highest
