"""A dashboard as the JSON that Grafana 11 to 13 reads from a folder."""

from __future__ import annotations

from collections.abc import Iterator

from grafanalib import core as grafanalib

from .annotations import marks
from .clean import STALE_IN_DASHBOARD, Json, cleaned
from .dashboard import Dashboard
from .draw import panel_json, row_json
from .grid import COLUMNS, HEADING_HEIGHT, Place, places
from .links import TAG, link_to_traces, links_between_dashboards
from .variables import variables

# The newest that Grafana 11 reads without migration; changes in 12 and 13 do not affect it.
# Below 14 Grafana would remove the shared crosshair.
SCHEMA_VERSION = 39
_SHARED_CROSSHAIR = 1
_REFRESH = "15s"


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
