"""Conversion of a dashboard to the JSON that Grafana 11 to 13 reads from a folder.

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

# The newest that Grafana 11 reads without migration; changes in 12 and 13 do not affect it.
# Below 14 Grafana would remove the shared crosshair.
SCHEMA_VERSION = 39
_SHARED_CROSSHAIR = 1
_REFRESH = "15s"
COLUMNS = 24
HEADING_HEIGHT = 1
TAG = "zerowatch"
_TEMPO = {"type": "tempo", "uid": "tempo"}
_RUN = ('job=~"$job"', 'run=~"$run"')
_FIRST_RANK = (*_RUN, 'rank="0"')
_STEP = "15s"  # between two looks; Grafana takes more where a graph has fewer points

BUILT_IN: Json = {
    "builtIn": 1,
    "datasource": {"type": "grafana", "uid": "-- Grafana --"},
    "enable": True,
    "hide": True,
    "iconColor": "rgba(0, 211, 255, 1)",
    "name": "Annotations & Alerts",
    "type": "dashboard",
}
# Grafana's numbers.
_SORTED, _NEWEST_FIRST, _BY_NUMBER = 1, 2, 3
_ON_TIME_RANGE_CHANGE = 2  # runs and ranks come and go
_LABEL_VALUES = 1
# What all ranks are: `.*` keeps queries short where Grafana would name a thousand of them.
_ALL_RANKS = ".*"


def dashboard_json(dashboard: Dashboard) -> Json:
    """Return a dashboard's JSON."""
    made = grafanalib.Dashboard(
        title=f"zerowatch / {dashboard.title}",
        uid=dashboard.uid,
        description=dashboard.description,
        tags=[TAG],
        annotations=grafanalib.Annotations(list=marks()),
        templating=grafanalib.Templating(list=variables()),
        time=grafanalib.Time(f"now-{dashboard.span}", "now"),
        timezone="browser",
        refresh=_REFRESH,
        graphTooltip=_SHARED_CROSSHAIR,
        schemaVersion=SCHEMA_VERSION,
        version=1,
    )
    json = cleaned(made, STALE_IN_DASHBOARD)
    json["links"] = [links_between_dashboards(), *map(link_to_traces, dashboard.traces)]
    json["panels"] = list(_panels(dashboard))
    json["timepicker"] = {"refresh_intervals": ["5s", "15s", "30s", "1m", "5m", "30m", "1h"]}
    return json


def _panels(dashboard: Dashboard) -> Iterator[Json]:
    """Yield headings and panels, numbered and placed."""
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
    """Yield each panel's place below `top`; a panel that no longer fits begins a new line.

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
    """Return the variables in the order in which one depends on the other.

    Runs are named by the time they began, so the last by name is the newest, and the one shown.
    """
    job, run = 'job=~"$job"', 'run=~"$run"'
    return [
        _data_source(),
        _label("job", "Job", select(RUN_ACTIVE), sort=_SORTED),
        _label("run", "Run", select(RUN_ACTIVE, job), sort=_NEWEST_FIRST),
        _label(
            "rank",
            "Rank",
            select(RUN_ACTIVE, job, run),
            sort=_BY_NUMBER,
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
    """Offer the values that a label has in a metric's series."""
    query = f"label_values({of}, {name})"
    made = grafanalib.Template(
        name=name,
        label=title,
        query=query,
        dataSource=PROMETHEUS,
        refresh=_ON_TIME_RANGE_CHANGE,
        regex="",
        **more,
    )
    json = cleaned(made, STALE_OF_VARIABLE)
    json["definition"] = query
    json["query"] = {"qryType": _LABEL_VALUES, "query": query, "refId": f"variable-{name}"}
    if more.get("includeAll"):
        json["current"] = {"selected": True, "text": ["All"], "value": ["$__all"]}
    return json


def marks() -> list[Json]:
    """Return what Grafana looks for; each can be switched off at the top of a dashboard."""
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
    """Return links to all dashboards with our tag, that take variables and time along."""
    return cleaned(
        grafanalib.DashboardLink(
            type="dashboards", tags=[TAG], includeVars=True, keepTime=True, icon="dashboard"
        )
    )


def link_to_traces(query: str) -> Json:
    """Return a link to Tempo's search.

    Args:
        query: TraceQL; `$run` in it becomes the run shown.
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
    # "$" stays as it is, so that Grafana finds its variables.
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
