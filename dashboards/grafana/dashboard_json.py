"""Converts a dashboard to the JSON that Grafana 11 to 13 reads from a folder.

Adds what all dashboards have in common: the variables at the top, annotations and links.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from grafanalib import core as grafanalib

from ...metrics.catalog.training import RUN_ACTIVE
from ...metrics.catalog.tuner import TUNER_DECISIONS
from ..promql import select
from .dashboard import Dashboard
from .grafanalib_cleanup import STALE_IN_DASHBOARD, STALE_OF_VARIABLE, Json, cleaned
from .panel_json import PROMETHEUS, Place, panel_json, row_json
from .panels import Panel

# The newest schema that Grafana 11 reads without a migration; Grafana 12 and 13 read it too. When
# Grafana migrates a dashboard with a schema below 14, it removes the shared crosshair.
SCHEMA_VERSION = 39
_SHARED_CROSSHAIR = 1  # the same time is marked in all graphs while pointing at one
_REFRESH = "15s"
COLUMNS = 24  # width of a dashboard
HEADING_HEIGHT = 1  # rows that a heading takes
TAG = "zerowatch"  # carried by all dashboards, which link to each other by it
_TEMPO = {"type": "tempo", "uid": "tempo"}
_RUN = ('job=~"$job"', 'run=~"$run"')
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
# The value of the rank variable when all ranks are chosen. Without it, Grafana would put the names
# of all ranks, perhaps a thousand, into each query.
_ALL_RANKS = ".*"


def dashboard_json(dashboard: Dashboard) -> Json:
    """Return the JSON of a dashboard, as a folder of Grafana's provisioning takes it."""
    made = grafanalib.Dashboard(
        title=f"zerowatch / {dashboard.title}",
        uid=dashboard.uid,
        description=dashboard.description,
        tags=[TAG],
        annotations=grafanalib.Annotations(list=graph_annotations()),
        templating=grafanalib.Templating(list=variables()),
        time=grafanalib.Time(f"now-{dashboard.span}", "now"),
        timezone="browser",
        refresh=_REFRESH,
        graphTooltip=_SHARED_CROSSHAIR,
        schemaVersion=SCHEMA_VERSION,
        version=1,
    )
    result = cleaned(made, STALE_IN_DASHBOARD)
    result["links"] = [links_between_dashboards(), *map(link_to_traces, dashboard.traces)]
    result["panels"] = list(_panels(dashboard))
    result["timepicker"] = {"refresh_intervals": ["5s", "15s", "30s", "1m", "5m", "30m", "1h"]}
    return result


def _panels(dashboard: Dashboard) -> Iterator[Json]:
    """Yield the JSON of all headings and panels, with their ids and positions."""
    number = top = 0
    for row in dashboard.rows:
        number += 1
        yield row_json(row.title, number, Place(0, top, COLUMNS, HEADING_HEIGHT))
        top += HEADING_HEIGHT
        bottom = top
        for panel, place in zip(row.panels, places(row.panels, top), strict=True):
            number += 1
            bottom = max(bottom, place.top + place.height)
            yield panel_json(panel, number, place)
        top = bottom


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


def variables() -> list[Json]:
    """Return the variables chosen at the top of a dashboard: data source, job, run and ranks.

    Each query depends on the variables before it. The name of a run begins with its start time, so
    in descending order the newest run is first, and Grafana selects the first by default.
    """
    job, run = 'job=~"$job"', 'run=~"$run"'
    return [
        _data_source(),
        _label("job", "Job", select(RUN_ACTIVE), sort=_SORT_ALPHABETICALLY),
        _label("run", "Run", select(RUN_ACTIVE, job), sort=_SORT_ALPHABETICALLY_DESCENDING),
        _label(
            "rank",
            "Rank",
            select(RUN_ACTIVE, job, run),
            sort=_SORT_BY_NUMBER,
            multi=True,
            includeAll=True,
            allValue=_ALL_RANKS,
        ),
    ]


def _data_source() -> Json:
    made = grafanalib.Template(
        name="datasource", label="Data source", type="datasource", query="prometheus", regex=""
    )
    return cleaned(made, STALE_OF_VARIABLE)


def _label(name: str, title: str, of: str, **more: Any) -> Json:
    """Return a variable whose choices are the values of the label `name` in the series `of`."""
    query = f"label_values({of}, {name})"
    made = grafanalib.Template(
        name=name,
        label=title,
        query=query,
        dataSource=PROMETHEUS,
        refresh=_REFRESH_ON_TIME_RANGE_CHANGE,
        regex="",
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

    A user can switch each of them off at the top of a dashboard.
    """
    first_rank = select(RUN_ACTIVE, *_FIRST_RANK)
    return [
        BUILT_IN,
        _annotation(
            "Alerts",
            f'ALERTS{{{", ".join(_RUN)}, alertstate="firing"}}',
            color="red",
            title="{{alertname}}",
            text="{{severity}} {{rank}}",
            tags="component,severity",
        ),
        _annotation(
            "Tuner",
            f"changes({select(TUNER_DECISIONS, *_FIRST_RANK)}[$__rate_interval]) > 0",
            color="purple",
            title="Tuner: {{verdict}}",
            text="See the dashboard Tuner for what it changed.",
            tags="verdict",
        ),
        _annotation(
            "Starts",
            f"{first_rank} == 1 unless {first_rank} offset 1m",
            color="blue",
            title="Run starts",
            text="{{run}}",
            tags="node",
        ),
    ]


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


def links_between_dashboards() -> Json:
    """Return the links to all zerowatch dashboards; they keep the variables and the time range."""
    return cleaned(
        grafanalib.DashboardLink(
            type="dashboards", tags=[TAG], includeVars=True, keepTime=True, icon="dashboard"
        )
    )


def link_to_traces(query: str) -> Json:
    """Return a link to a search for traces in Tempo.

    Args:
        query: The search in TraceQL; Grafana replaces `$run` by the selected run.
    """
    pane = {
        "datasource": _TEMPO["uid"],
        "queries": [
            {
                "datasource": _TEMPO,
                "limit": 20,
                "query": query,
                "queryType": "traceql",
                "refId": "A",
                "tableType": "traces",
            }
        ],
        "range": {"from": "$__from", "to": "$__to"},
    }
    # "$" is not escaped, because Grafana replaces its variables before it decodes the URL.
    panes = quote(json.dumps({"zerowatch": pane}, separators=(",", ":")), safe="$")
    return cleaned(
        grafanalib.DashboardLink(
            type="link",
            title="Traces",
            tooltip="Sampled and slow steps of this run in Tempo, where traces are sent to it",
            uri=f"/explore?schemaVersion=1&panes={panes}",
            icon="external link",
            keepTime=False,
        )
    )
