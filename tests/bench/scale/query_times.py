"""Measures Prometheus' time for Grafana's queries: by query, and by dashboard."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from servers.grafana_reader import (
    DashboardQuery,
    Reader,
    dashboard_queries,
    panels,
    variables,
)
from servers.prometheus_server import Prometheus

DASHBOARDS = Path(__file__).parents[3] / "dashboards" / "rendered" / "grafana"
TRIALS = 3
BROWSER_CONNECTIONS = 6
_LABEL_VALUES = re.compile(r"label_values\((.+), *(\w+)\)")

Dashboard = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A query, the median time of its trials, and the number of series in its result.

    `panel_type` is Grafana's, such as "heatmap"; empty for annotations and variables.
    """

    name: str
    panel_type: str
    seconds: float
    series: int


def dashboards() -> list[Dashboard]:
    return [json.loads(file.read_text()) for file in sorted(DASHBOARDS.glob("*.json"))]


def time_queries(prometheus: Prometheus, dashboard: Dashboard, reader: Reader) -> list[Asked]:
    """Send each query of a dashboard and of its variables, one after another."""
    types = {panel["title"]: panel["type"] for panel in panels(dashboard)}
    asked = [
        _timed(
            query.name,
            lambda query=query: reader.ask(prometheus, query, dashboard, time.time()),
            types.get(query.panel, ""),
        )
        for query in dashboard_queries(dashboard)
    ]
    for variable in variables(dashboard):
        if found := _LABEL_VALUES.fullmatch(_text(variable)):
            asked.append(
                _time_variable(prometheus, dashboard, reader, variable["name"], *found.groups())
            )
    return asked


def time_dashboard(prometheus: Prometheus, dashboard: Dashboard, reader: Reader) -> float:
    """Send a dashboard's queries six at once, as a browser does; return the total seconds."""
    began = time.monotonic()
    with ThreadPoolExecutor(BROWSER_CONNECTIONS) as pool:
        ask = lambda query: reader.ask(prometheus, query, dashboard, time.time())  # noqa: E731
        list(pool.map(ask, dashboard_queries(dashboard)))
    return time.monotonic() - began


def _time_variable(
    prometheus: Prometheus,
    dashboard: Dashboard,
    reader: Reader,
    name: str,
    selector: str,
    label: str,
) -> Asked:
    """Time the query for the values of a dashboard variable."""
    query = DashboardQuery(
        dashboard=dashboard["uid"],
        panel="variable",
        ref=name,
        expression=selector,
        is_instant=False,
    )
    parameters = {
        "match[]": reader.fill_in(query, dashboard),
        "start": time.time() - reader.range_seconds,
        "end": time.time(),
    }
    return _timed(query.name, lambda: prometheus.ask(f"label/{label}/values", **parameters))


def _timed(name: str, ask: Callable[[], list[Any]], panel_type: str = "") -> Asked:
    seconds = []
    for _ in range(TRIALS):
        began = time.monotonic()
        series = len(ask())
        seconds.append(time.monotonic() - began)
    return Asked(name=name, panel_type=panel_type, seconds=median(seconds), series=series)


def _text(variable: Mapping[str, Any]) -> str:
    query = variable.get("query", "")
    return str(query.get("query", "") if isinstance(query, dict) else query)
