"""How panels show their figures: kind, unit, scale, colors by value, and what is special."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerowatch.dashboards.definitions import (
    DASHBOARDS,
    across_ranks,
    communication,
    compare,
    devices,
    memory,
    overhead,
    overview,
    runs,
    shared_panels,
    step_anatomy,
    tuner,
)
from zerowatch.dashboards.grafana.dashboard import Dashboard, Row
from zerowatch.dashboards.grafana.dashboard_json import places
from zerowatch.dashboards.grafana.panels import Column, Panel, Stat, Step, Table, XYChart
from zerowatch.metrics.catalog import CATALOG

OPTIONS = Path(__file__).with_name("panel_options.txt").read_text()
BY_NAME = {
    page.DASHBOARD.name: page.DASHBOARD
    for page in (
        *(runs, overview, step_anatomy, communication, memory, devices, tuner, overhead, compare),
    )
}
PANELS = [
    pytest.param(panel, id=f"{dashboard.name}: {panel.title}")
    for dashboard in DASHBOARDS
    for panel in dashboard.panels()
]
# Grafana's names of colors.
COLOR = re.compile(
    r"((super-light|light|semi-dark|dark)-)?(red|orange|yellow|green|blue|purple)|text|transparent"
)
# The series that have a color of their own, by the label that names them.
COLORED = {
    "phase of zerowatch_phase_seconds_total": shared_panels.PHASE_COLORS,
    "cause of zerowatch_comm_cause_seconds_total": communication.CAUSE_COLORS,
    "kind of zerowatch_comm_step_wire_bytes": communication.STEP_BYTES_COLORS,
    "category of zerowatch_memory_category_bytes": memory.CATEGORY_COLORS,
    "part of zerowatch_watch_seconds_total": overhead.PART_COLORS,
    "verdict of zerowatch_tuner_decisions_total": tuner.VERDICTS,
    "stat of zerowatch_ranks_mfu_ratio": across_ranks.COLORS,
}


def page(dashboard: Dashboard) -> str:
    """Return what a dashboard is about, its time range and the time between updates."""
    return f"{dashboard.name}: {dashboard.about}, {dashboard.span}, each {dashboard.refresh}"


def heading(row: Row) -> str:
    return f"- {row.title}{' (collapsed)' if row.collapsed else ''}"


def described(panel: Panel) -> str:
    return f"{panel.title}: {', '.join(looks(panel))}"


def looks(panel: Panel) -> Iterator[str]:
    """Yield the words that describe how a panel shows its figures."""
    yield from (type(panel).__name__, panel.unit)
    if panel.minimum is not None or panel.maximum is not None:
        yield f"{panel.minimum}..{'' if panel.maximum is None else panel.maximum}"
    yield from figures(panel)
    for word in ("stacked", "log_scale", "plain", "low_is_bad", "named"):
        if getattr(panel, word, False):
            yield word
    if isinstance(panel, Stat) and panel.color != "value":
        yield f"colored {panel.color}"
    yield from (f"{legend} in {unit}" for legend, unit in panel.units.items())
    for query in panel.queries:
        words = [] if query.shape == "series" else [query.shape]
        words += ["dashed"] if query.is_limit else []
        words += ["exemplars"] if query.exemplars else []
        words += [word for word in ("topk", "bottomk") if f"{word}(8," in query.expression]
        if words:
            yield f"<{query.legend}> {' '.join(words)}"
    if panel.empty:
        yield f"else {panel.empty!r}"
    if panel.dashboard:
        yield f"to {panel.dashboard}"
    if isinstance(panel, Table):
        yield from table(panel)
    if isinstance(panel, XYChart):
        yield f"over {panel.x_title}"
        yield from (f"{curve.name} {curve.color}" for curve in panel.curves)


def figures(of: Panel | Column) -> Iterator[str]:
    """Yield the digits after the decimal point and the colors by value, the lowest first."""
    if of.decimals is not None:
        yield f".{of.decimals}"
    if of.thresholds:
        yield " ".join(map(step, of.thresholds))


def step(of: Step) -> str:
    return of.color if of.value is None else f"{of.value:g} {of.color}"


def table(panel: Table) -> Iterator[str]:
    """Yield the headings of labels, the columns, the order of rows and of columns."""
    yield "+".join(panel.labels.values())
    for column in panel.columns:
        words = [column.title, column.unit, *figures(column)]
        words += [f"bar until {column.bar_until}"] if column.bar_until else []
        words += ["named"] if column.named else []
        words += [word for word in ("topk", "bottomk") if f"{word}(10," in column.expression]
        yield f"[{' '.join(words)}]"
    if panel.sort_by:
        yield f"by {panel.sort_by} {'up' if panel.ascending else 'down'}"
    if panel.after:
        yield f"at last {'+'.join(panel.after)}"
    if panel.lower_case:
        yield f"lower case {'+'.join(panel.lower_case)}"


def test_the_dashboards_are_in_the_order_in_which_to_read_them() -> None:
    assert tuple(BY_NAME.values()) == DASHBOARDS


@pytest.mark.parametrize("name", BY_NAME)
def test_rows_and_panels_look_as_listed(name: str) -> None:
    dashboard = BY_NAME[name]
    listed = next(part for part in OPTIONS.split("\n= ")[1:] if part.startswith(f"{name}:"))

    assert listed.strip().splitlines() == [
        page(dashboard),
        *(line for row in dashboard.rows for line in (heading(row), *map(described, row.panels))),
    ]


@pytest.mark.parametrize("name", BY_NAME)
def test_the_panels_of_a_line_fill_its_width_and_are_of_one_height(name: str) -> None:
    for row in BY_NAME[name].rows:
        lines: dict[int, list[Panel]] = {}
        for panel, place in zip(row.panels, places(row.panels, top=0), strict=True):
            lines.setdefault(place.top, []).append(panel)

        for line in lines.values():
            assert sum(panel.width for panel in line) == 24, [panel.title for panel in line]
            assert len({panel.height for panel in line}) == 1, [panel.title for panel in line]


@pytest.mark.parametrize("where", COLORED)
def test_each_value_of_a_label_has_a_color_of_its_own(where: str) -> None:
    label, _, metric = where.partition(" of ")
    (values,) = (
        each.values
        for spec in CATALOG
        for each in spec.labels
        if (each.name, spec.name) == (label, metric)
    )
    colors = COLORED[where]

    assert colors.keys() == set(values)
    shared = [color for color in colors.values() if color != "text"]
    assert len(set(shared)) == len(shared)


@pytest.mark.parametrize("panel", PANELS)
def test_colors_and_units_are_of_series_that_a_panel_has(panel: Panel) -> None:
    legends = {query.legend for query in panel.queries}
    of_labels = {legend for legend in legends if legend.startswith("{{")}
    series = {*panel.colors, *panel.units}

    assert of_labels or series <= legends | memory.STATE_COLORS.keys()
    assert [color for color in panel.colors.values() if not COLOR.fullmatch(color)] == []


@pytest.mark.parametrize("panel", [each for each in PANELS if isinstance(each.values[0], Table)])
def test_the_order_and_widths_of_a_table_name_its_columns(panel: Table) -> None:
    labels = set(panel.labels.values())
    columns = {column.title for column in panel.columns}

    assert {*panel.after, *panel.lower_case} <= labels
    assert {*panel.widths} <= labels | columns
    assert panel.sort_by in {"", *columns}


def test_the_states_of_a_run_have_texts_and_colors() -> None:
    assert [(state.value, state.text, state.color) for state in shared_panels.STATES] == [
        (1, "training", "green"),
        (2, "starting", "blue"),
        (3, "stalled", "red"),
        (4, "hanging", "red"),
        (10, "completed", "text"),
        (11, "interrupted", "text"),
        (12, "peer failed", "red"),
        (13, "hang abort", "red"),
        (14, "exception", "red"),
        (15, "out of memory", "red"),
        (16, "ended", "orange"),
        (20, "vanished", "red"),
    ]


def test_the_states_of_the_tuner_are_off_and_on() -> None:
    assert [(state.value, state.text, state.color) for state in tuner.OFF_AND_ON] == [
        (0, "-", "transparent"),
        (1, "in this state", "blue"),
    ]


def test_the_memory_states_of_both_panels_have_colors() -> None:
    legends = {
        query.legend
        for panel in memory.DASHBOARD.panels()
        if panel.colors is memory.STATE_COLORS
        for query in panel.queries
    }

    assert legends == memory.STATE_COLORS.keys()


@pytest.mark.parametrize("panel", PANELS)
def test_the_worst_series_of_a_graph_are_chosen_by_all_labels_of_their_legend(
    panel: Panel,
) -> None:
    for query in panel.queries:
        chosen = re.search(r"and on \((.*)\) (?:top|bottom)k\(8, avg", query.expression)
        if chosen:
            labels = re.findall(r"{{(\w+)}}", query.legend)
            assert chosen[1].split(", ") == ["job", "run", *labels]
