"""Queries that Grafana sends to Prometheus for a dashboard: its queries, with variables filled in.

The macros are those of Grafana's Prometheus data source (grafana.com/docs, "Prometheus template
variables" and "Global variables"); the widths of steps are `roundInterval` of @grafana/data.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from servers.prometheus_server import Prometheus

# A step below the first bound takes the first width, and so on, in seconds.
_BOUNDS = (0.15, 0.35, 0.75, 1.5, 3.5, 7.5, 12.5, 17.5, 25, 45, 90, 210, 450, 750, 1050, 1500, 2700)
_WIDTHS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600)
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PIXELS = 1000
_POINTS_OF_ANNOTATION = 100
_SPECIAL = re.compile(r"[\\^$*+?.()|[\]{}/]")  # what the format `regex` escapes


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardQuery:
    """One query of one panel (or of an annotation), as in the dashboard's JSON."""

    dashboard: str
    panel: str
    ref: str
    expression: str
    is_instant: bool
    min_step: str = ""
    max_points: int = _PIXELS
    is_annotation: bool = False

    @property
    def name(self) -> str:
        return f"{self.dashboard}: {self.panel} ({self.ref})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Who looks at a dashboard: which data, how far back, and how often it is scraped.

    Attributes:
        variables: Every value of a variable; the reader has chosen all of them.
        range_seconds: The time shown.
        scrape_seconds: What the data source says of the scrape interval.
    """

    variables: Mapping[str, Sequence[str]] = field(default_factory=dict)
    range_seconds: float = 3600.0
    scrape_seconds: float = 15.0

    def step_seconds(self, query: DashboardQuery) -> float:
        least = _seconds(query.min_step) if query.min_step else self.scrape_seconds
        raw = self.range_seconds / query.max_points
        return max(_WIDTHS[bisect_right(_BOUNDS, raw)], least)

    def fill_in(self, query: DashboardQuery, dashboard: Mapping[str, Any]) -> str:
        """Return the query's PromQL as it is sent."""
        step = self.step_seconds(query)
        # Grafana does not say how far apart the points of an annotation are: its server takes 1 s.
        asked = 1.0 if query.is_annotation else step
        rate_seconds = max(asked + self.scrape_seconds, 4 * self.scrape_seconds)
        texts = {
            "__rate_interval": _duration(rate_seconds),
            "__interval": _duration(step),
            "__interval_ms": str(round(step * 1000)),
            "__range": _duration(self.range_seconds),
            "__range_s": str(round(self.range_seconds)),
            "__range_ms": str(round(self.range_seconds * 1000)),
            **{entry["name"]: self._text(entry) for entry in variables(dashboard)},
        }

        def text(variable: re.Match[str]) -> str:
            plain = texts[variable[1] or variable[2]]
            return _SPECIAL.sub(r"\\\g<0>", plain) if variable[3] == "regex" else plain

        return re.sub(r"\$(\w+)|\$\{(\w+)(?::(\w+))?\}", text, query.expression)

    def ask(
        self,
        prometheus: Prometheus,
        query: DashboardQuery,
        dashboard: Mapping[str, Any],
        end: float,
    ) -> list[dict[str, Any]]:
        """Return the series that the panel gets for the time up to `end`."""
        promql = self.fill_in(query, dashboard)
        if query.is_instant:
            return prometheus.series(promql, time=end)
        step = self.step_seconds(query)
        end -= end % step  # so that a reload asks for the same points
        answer = prometheus.ask(
            "query_range", query=promql, start=end - self.range_seconds, end=end, step=step
        )
        return list(answer.get("result", []))

    def _text(self, entry: Mapping[str, Any]) -> str:
        """Text that replaces a variable, with all its values chosen."""
        if entry.get("includeAll") and entry.get("allValue"):
            return str(entry["allValue"])
        if entry["type"] != "query":
            return str(entry.get("current", {}).get("value", ""))
        known = self.variables[entry["name"]]
        return known[0] if len(known) == 1 else f"({'|'.join(known)})"


def dashboard_queries(dashboard: Mapping[str, Any]) -> Iterator[DashboardQuery]:
    """Yield the queries of a dashboard's panels, also in collapsed rows, and of its annotations."""
    for panel in panels(dashboard):
        for target in panel.get("targets", ()):
            if target.get("expr"):
                yield DashboardQuery(
                    dashboard=dashboard["uid"],
                    panel=panel["title"],
                    ref=target["refId"],
                    expression=target["expr"],
                    is_instant=bool(target.get("instant")) and not target.get("range"),
                    min_step=target.get("interval") or panel.get("interval") or "",
                    max_points=panel.get("maxDataPoints") or _PIXELS,
                )
    for annotation in dashboard["annotations"]["list"]:
        expression = annotation.get("expr") or annotation.get("target", {}).get("expr")
        if expression:
            yield DashboardQuery(
                dashboard=dashboard["uid"],
                panel=f"annotation {annotation['name']}",
                ref="Anno",
                expression=expression,
                is_instant=False,
                min_step=annotation.get("step", ""),
                max_points=_POINTS_OF_ANNOTATION,
                is_annotation=True,
            )


def panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def variables(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(dashboard.get("templating", {}).get("list", ()))


def _seconds(duration: str) -> float:
    number, unit = re.fullmatch(r">?([\d.]+)(ms|s|m|h|d)", duration).groups()
    return float(number) * _UNIT_SECONDS[unit]


def _duration(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"
