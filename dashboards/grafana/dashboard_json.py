"""Converts a dashboard to the JSON that Grafana 11 to 13 reads from a folder.

Adds what all dashboards have in common: the variables at the top, annotations and links.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from grafanalib import core as grafanalib

from ...metrics.catalog.training import RUN_ACTIVE
from ...metrics.catalog.tuner import TUNER_DECISIONS
from ..promql import earlier, select
from .dashboard import Dashboard, Row
from .grafanalib_cleanup import STALE_IN_DASHBOARD, STALE_OF_VARIABLE, Json, cleaned
from .links import RUNBOOK, Here, traces_url
from .panel_json import PROMETHEUS, Place, panel_json, row_json
from .panels import Panel, Table, Text, XYChart

# The newest schema that Grafana 11 reads without a migration; Grafana 12 and 13 read it too. When
# Grafana migrates a dashboard with a schema below 14, it removes the shared crosshair.
SCHEMA_VERSION = 39
_SHARED_CROSSHAIR = 1  # the same time is marked in all graphs while pointing at one
COLUMNS = 24  # width of a dashboard
HEADING_HEIGHT = 1  # rows that a heading takes
TAG = "zerowatch"  # carried by all dashboards, which link to each other by it
_JOB = 'job="$job"'
_RUN = (_JOB, 'run="$run"')
_FIRST_RANK = (*_RUN, 'rank="0"')
_STEP = "15s"  # between two points of an annotation query; Grafana increases it on long ranges

# The annotation that Grafana adds to every dashboard by itself.
BUILT_IN: Json = {
    "builtIn": 1,
    "datasource": {"type": "grafana", "uid": "-- Grafana --"},
    "enable": True,
    "hide": True,
    "iconColor": "rgba(0, 211, 255, 1)",
    "name": "Annotations & Alerts",
    "type": "dashboard",
}
# Grafana's codes for the options of a variable.
_SORT_ALPHABETICALLY = 1
_SORT_ALPHABETICALLY_DESCENDING = 2
_SORT_BY_NUMBER = 3
_REFRESH_ON_TIME_RANGE_CHANGE = 2  # because runs and ranks start and end
_LABEL_VALUES_QUERY = 1
# A variable of which several values can be chosen, and all are by default. Without `allValue`,
# Grafana would put the names of all ranks, perhaps a thousand, into each query.
_ALL: Mapping[str, Any] = {"multi": True, "includeAll": True, "allValue": ".*"}
_ONE: Mapping[str, Any] = {}
_RANK = "rank"
RUN_A, RUN_B = "run_a", "run_b"  # the variables of a dashboard that compares two runs
ALL_RANKS = " (all ranks)"  # marks what the choice of a rank does not change


def dashboard_json(dashboard: Dashboard, runbook: str = "") -> Json:
    """Return the JSON of a dashboard, as a folder of Grafana's provisioning takes it.

    Args:
        dashboard: The dashboard.
        runbook: The address of the runbook, to which rows of alerts link.
    """
    chosen = variables(dashboard, runbook)
    made = grafanalib.Dashboard(
        title=f"zerowatch / {dashboard.title}",
        uid=dashboard.uid,
        description=dashboard.description,
        tags=[TAG],
        annotations=grafanalib.Annotations(
            list=graph_annotations() if dashboard.about == "run" else [BUILT_IN]
        ),
        templating=grafanalib.Templating(list=chosen),
        time=grafanalib.Time(f"now-{dashboard.span}", "now"),
        timezone="browser",
        refresh=dashboard.refresh,
        graphTooltip=_SHARED_CROSSHAIR,
        schemaVersion=SCHEMA_VERSION,
        version=1,
    )
    result = cleaned(made, STALE_IN_DASHBOARD)
    result["links"] = [
        links_between_dashboards(is_about_a_run=dashboard.about == "run"),
        *map(link_to_traces, dashboard.traces),
    ]
    here = Here(dashboard.uid, [variable["name"] for variable in chosen])
    result["panels"] = list(_panels(dashboard, here))
    result["timepicker"] = {"refresh_intervals": ["5s", "15s", "30s", "1m", "5m", "30m", "1h"]}
    return result


def _panels(dashboard: Dashboard, here: Here) -> Iterator[Json]:
    """Yield the JSON of all headings and panels, with their ids and positions."""
    number = top = 0
    for row in dashboard.rows:
        if _RANK in here.variables:
            row = _marked(row)
        heading = number + 1
        placed = list(zip(row.panels, places(row.panels, top + HEADING_HEIGHT), strict=True))
        inner = [
            panel_json(panel, heading + 1 + index, place, here)
            for index, (panel, place) in enumerate(placed)
        ]
        number = heading + len(inner)
        position = Place(0, top, COLUMNS, HEADING_HEIGHT)
        yield row_json(row.title, heading, position, inner if row.collapsed else None)
        top += HEADING_HEIGHT
        if not row.collapsed:
            yield from inner
            top = max([top, *(place.top + place.height for _, place in placed)])


def _marked(row: Row) -> Row:
    """Mark what does not depend on the choice of a rank: the whole row, or its panels."""
    by_choice = [_uses(_RANK, panel) or isinstance(panel, Text) for panel in row.panels]
    if not any(by_choice):
        return replace(row, title=row.title + ALL_RANKS)
    return replace(
        row,
        panels=tuple(
            panel if chosen else replace(panel, title=panel.title + ALL_RANKS)
            for panel, chosen in zip(row.panels, by_choice, strict=True)
        ),
    )


def _uses(variable: str, panel: Panel) -> bool:
    """Whether a query of the panel depends on a variable."""
    return any(re.search(rf"\${variable}\b", expression) for expression in _expressions(panel))


def _expressions(panel: Panel) -> Iterator[str]:
    yield from (query.expression for query in panel.queries)
    if isinstance(panel, Table):
        yield from (column.expression for column in panel.columns)
    if isinstance(panel, XYChart):
        yield from (expression for curve in panel.curves for expression in (curve.x, curve.y))


def places(panels: Sequence[Panel], top: int) -> Iterator[Place]:
    """Yield the position of each panel, filling lines of 24 columns from left to right.

    A panel that does not fit into the current line starts the next one.

    Args:
        panels: The panels of one heading.
        top: The first row that they may use.

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


def variables(dashboard: Dashboard, runbook: str = "") -> list[Json]:
    """Return the variables at the top of a dashboard.

    Each query depends on the variables before it. A node and a rank can be chosen only where a
    query depends on the choice. The name of a run begins with its start time, so in descending
    order the newest run is first, and Grafana selects the first by default.

    Args:
        dashboard: The dashboard.
        runbook: The value of the hidden variable with the address of the runbook.
    """
    result = [_data_source(), _constant(RUNBOOK, runbook)]
    if dashboard.about == "runs":
        return [*result, _label("job", "Job", select(RUN_ACTIVE), _SORT_ALPHABETICALLY, _ALL)]
    if dashboard.about == "two runs":
        jobs, other = 'job=~"$job"', f'run!="${RUN_A}"'
        newest_first = _SORT_ALPHABETICALLY_DESCENDING
        return [
            *result,
            _label("job", "Job", select(RUN_ACTIVE), _SORT_ALPHABETICALLY, _ALL),
            _label(RUN_A, "Run A", select(RUN_ACTIVE, jobs), newest_first, values_of="run"),
            _label(RUN_B, "Run B", select(RUN_ACTIVE, jobs, other), newest_first, values_of="run"),
        ]
    result += [
        _label("job", "Job", select(RUN_ACTIVE), _SORT_ALPHABETICALLY),
        _label("run", "Run", select(RUN_ACTIVE, _JOB), _SORT_ALPHABETICALLY_DESCENDING),
    ]
    panels = list(dashboard.panels())
    if any(_uses("node", panel) for panel in panels):
        active = select(RUN_ACTIVE, *_RUN)
        result.append(_label("node", "Node", active, _SORT_ALPHABETICALLY, _ALL))
    if any(_uses(_RANK, panel) for panel in panels):
        active = select(RUN_ACTIVE, *_RUN, 'node=~"$node"')
        result.append(_label(_RANK, "Rank", active, _SORT_BY_NUMBER, _ALL))
    return result


def _constant(name: str, value: str) -> Json:
    """Return a hidden variable with a fixed value."""
    made = grafanalib.Template(
        name=name, type="constant", query=value, hide=grafanalib.HIDE_VARIABLE
    )
    wanted = {"hide", "name", "query", "type"}
    return {key: value for key, value in cleaned(made).items() if key in wanted}


def _data_source() -> Json:
    made = grafanalib.Template(
        name="datasource", label="Data source", type="datasource", query="prometheus", regex=""
    )
    return cleaned(made, STALE_OF_VARIABLE)


def _label(
    name: str,
    title: str,
    of: str,
    sort: int,
    more: Mapping[str, Any] = _ONE,
    *,
    values_of: str = "",
) -> Json:
    """Return a variable whose choices are the values of a label in the series `of`.

    Args:
        name: The name of the variable.
        title: What the dashboard shows next to the choices.
        of: The selector of the series.
        sort: One of Grafana's codes for the order of the choices.
        more: Whether one value is chosen or several.
        values_of: The label; by default `name`.
    """
    query = f"label_values({of}, {values_of or name})"
    made = grafanalib.Template(
        name=name,
        label=title,
        query=query,
        dataSource=PROMETHEUS,
        refresh=_REFRESH_ON_TIME_RANGE_CHANGE,
        regex="",
        sort=sort,
        **more,
    )
    result = cleaned(made, STALE_OF_VARIABLE)
    result["definition"] = query
    result["query"] = {"qryType": _LABEL_VALUES_QUERY, "query": query, "refId": f"variable-{name}"}
    if more.get("includeAll"):
        result["current"] = {"selected": True, "text": ["All"], "value": ["$__all"]}
    return result


def graph_annotations() -> list[Json]:
    """Return the annotations of every graph: firing alerts, tuner decisions and starts of runs.

    A user can switch each of them off at the top of a dashboard. Grafana asks for 100 points of any
    time range. `$__interval` is the time between two of them, so each mark is at one point;
    `$__rate_interval` is a minute in an annotation.
    """
    # Rank 0 serves only once its model is loaded, perhaps minutes after the start of the process.
    process = f"process_start_time_seconds{{{', '.join(_FIRST_RANK)}}}"
    decisions = select(TUNER_DECISIONS, *_FIRST_RANK)
    firing = f'ALERTS{{{", ".join(_RUN)}, alertstate="firing"}}'
    return [
        BUILT_IN,
        _annotation(
            "Alerts",
            f"{firing} or {_latest(firing)}",
            color="red",
            title="{{alertname}}",
            text="{{severity}} {{rank}}",
            tags="component,severity",
        ),
        _annotation(
            "Tuner",
            f"{_latest(decisions)} > 0 unless {_before(decisions)}",
            color="purple",
            title="Tuner: {{verdict}}",
            text="See the dashboard Tuner for what it changed.",
            tags="verdict",
        ),
        _annotation(
            "Starts",
            f"{_latest(process)} unless {_before(process)}",
            color="blue",
            title="Run starts",
            text="{{run}}",
            tags="node",
        ),
    ]


def _latest(series: str) -> str:
    """Return the last value since the point before, also of a run that ended between both."""
    return f"last_over_time({series}[$__interval])"


def _before(series: str) -> str:
    """Return the series whose value is the same at the point before."""
    return f"{_latest(series)} == {earlier(series, '$__interval', gap='1h')}"


def _annotation(
    name: str, expression: str, *, color: str, title: str, text: str, tags: str
) -> Json:
    return {
        "datasource": PROMETHEUS,
        "enable": True,
        "expr": expression,
        "hide": False,
        "iconColor": color,
        "name": name,
        "step": _STEP,
        "tagKeys": tags,
        "textFormat": text,
        "titleFormat": title,
    }


def links_between_dashboards(*, is_about_a_run: bool) -> Json:
    """Return the links to all zerowatch dashboards.

    Between dashboards about one run they keep the variables and the time range.
    """
    return cleaned(
        grafanalib.DashboardLink(
            type="dashboards",
            tags=[TAG],
            includeVars=is_about_a_run,
            keepTime=is_about_a_run,
            icon="dashboard",
        )
    )


def link_to_traces(query: str) -> Json:
    """Return a link at the top of a dashboard to a search for traces; `query` is in TraceQL."""
    return cleaned(
        grafanalib.DashboardLink(
            type="link",
            title="Traces",
            tooltip="Sampled and slow steps of this run in Tempo, where traces are sent to it",
            uri=traces_url(query),
            icon="external link",
            keepTime=False,
        )
    )
