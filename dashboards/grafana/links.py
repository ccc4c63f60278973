"""Where dashboards and panels lead: to other dashboards, and to a run's traces."""

from __future__ import annotations

import json
from urllib.parse import quote

from grafanalib import core as grafanalib

from .clean import Json, cleaned

TAG = "zerowatch"
_TEMPO = {"type": "tempo", "uid": "tempo"}


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


def link_to_dashboard(uid: str) -> Json:
    """Return a panel's link to the dashboard with details; it keeps variables and time."""
    return cleaned(
        grafanalib.DashboardLink(
            type="link",
            title=f"More on the dashboard {uid.removeprefix('zerowatch-').replace('-', ' ')}",
            uri=f"/d/{uid}?${{__all_variables}}&${{__url_time_range}}",
            icon="dashboard",
            keepTime=False,
        )
    )
