"""Each kind of panel as Grafana's JSON.

grafanalib's gauge, bar gauge, heatmap and table are those of Grafana 6: the calculation they are
given goes unread. Their options are written here, upon grafanalib's plain panel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grafanalib import core as grafanalib

from . import table
from .clean import STALE_OF_PANEL, Json, cleaned
from .field import defaults, overrides_by_color, value_mappings
from .grid import Place
from .links import link_to_dashboard
from .panels import (
    BarGauge,
    Gauge,
    Heatmap,
    Panel,
    Stat,
    StateTimeline,
    Table,
    Text,
    TimeSeries,
)
from .target import PROMETHEUS, target

# Without it Grafana takes a panel for one of version 6 and migrates what needs none.
PLUGIN_VERSION = "11.6.0"
LAST = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
LEGEND = {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True}
NO_LEGEND = {"calcs": [], "displayMode": "hidden", "placement": "bottom", "showLegend": False}


def panel_json(panel: Panel, number: int, place: Place) -> Json:
    """Return a panel's JSON; `number` is its id."""
    draw = _DRAW[type(panel)]
    json = cleaned(draw(panel, _shared(panel, number, place)), STALE_OF_PANEL)
    json["fieldConfig"].setdefault("overrides", [])
    if not json["fieldConfig"]["defaults"]["thresholds"]["steps"]:
        del json["fieldConfig"]["defaults"]["thresholds"]
    return {key: value for key, value in json.items() if value != []}


def row_json(title: str, number: int, place: Place) -> Json:
    """Return a heading's JSON, the panels under which follow it."""
    row = grafanalib.RowPanel(title=title, id=number, gridPos=_position(place))
    wanted = {"collapsed", "gridPos", "id", "panels", "title", "type"}
    return {key: value for key, value in cleaned(row).items() if key in wanted}


def _shared(panel: Panel, number: int, place: Place) -> Json:
    """Return grafanalib's arguments that all panels have."""
    return {
        "id": number,
        "title": panel.title,
        "description": panel.description,
        "gridPos": _position(place),
        "dataSource": PROMETHEUS,
        "targets": [target(query, index) for index, query in enumerate(panel.queries)],
        "thresholds": [{"color": step.color, "value": step.value} for step in panel.thresholds],
        "links": [link_to_dashboard(panel.dashboard)] if panel.dashboard else [],
    }


def _position(place: Place) -> Any:
    return grafanalib.GridPos(h=place.height, w=place.width, x=place.left, y=place.top)


def _time_series(panel: TimeSeries, shared: Json) -> Any:
    scale = {"type": "log", "log": 10} if panel.log_scale else {"type": "linear", "log": None}
    custom = {"scaleDistribution": scale, "axisSoftMax": _above_limits(panel)}
    return grafanalib.TimeSeries(
        **shared,
        fillOpacity=70 if panel.stacked else 8,
        lineWidth=0 if panel.stacked else 1,
        stacking={"mode": "normal" if panel.stacked else "none", "group": "A"},
        thresholdsStyleMode="dashed" if panel.thresholds else "off",
        tooltipMode="multi",
        tooltipSort="desc",
        overrides=overrides_by_color(panel),
        extraJson={
            "pluginVersion": PLUGIN_VERSION,
            "fieldConfig": {"defaults": {**defaults(panel), "custom": custom}},
            "options": {"legend": LEGEND, "tooltip": {"hideZeros": False}},
        },
    )


def _above_limits(panel: TimeSeries) -> float | None:
    """Return up to where an axis should go at least, so that limits are in the picture."""
    limits = [step.value for step in panel.thresholds if step.value]
    return max(limits) * 1.1 if limits and panel.maximum is None else None


def _stat(panel: Stat, shared: Json) -> Any:
    return grafanalib.Stat(
        **shared,
        reduceCalc="lastNotNull",
        noValue=None,  # grafanalib's own is the word "none"
        colorMode=panel.color,
        graphMode="none" if panel.plain else "area",
        textMode=_text_mode(panel),
        overrides=overrides_by_color(panel),
        extraJson={
            "pluginVersion": PLUGIN_VERSION,
            "fieldConfig": {
                "defaults": {
                    **defaults(panel),
                    "color": {"mode": "thresholds"},
                    "mappings": value_mappings(panel.named),
                }
            },
            "options": {
                "percentChangeColorMode": "standard",
                "showPercentChange": False,
                "wideLayout": True,
            },
        },
    )


def _text_mode(panel: Stat) -> str:
    """Let Grafana name the values, even a lone one if its name is a label's value."""
    is_label = any("{{" in query.legend for query in panel.queries)
    return "value_and_name" if is_label else "auto"


def _gauge(panel: Gauge, shared: Json) -> Any:
    return _other(
        "gauge",
        panel,
        shared,
        {
            **LAST,
            "minVizHeight": 75,
            "minVizWidth": 75,
            "orientation": "auto",
            "showThresholdLabels": False,
            "showThresholdMarkers": True,
            "sizing": "auto",
        },
    )


def _bar_gauge(panel: BarGauge, shared: Json) -> Any:
    return _other(
        "bargauge",
        panel,
        shared,
        {
            **LAST,
            "displayMode": "basic",
            "legend": NO_LEGEND,
            "maxVizHeight": 40,
            "minVizHeight": 16,
            "minVizWidth": 8,
            "namePlacement": "auto",
            "orientation": "horizontal",
            "showUnfilled": True,
            "sizing": "auto",
            "valueMode": "color",
        },
    )


def _heatmap(panel: Heatmap, shared: Json) -> Any:
    options = {
        "calculate": False,
        "cellGap": 1,
        "color": {
            "exponent": 0.5,
            "fill": "dark-orange",
            "mode": "scheme",
            "reverse": False,
            "scale": "exponential",
            "scheme": "Oranges",
            "steps": 64,
        },
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "showColorScale": True, "yHistogram": True},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": panel.unit},
    }
    hidden = {"hideFrom": {"legend": False, "tooltip": False, "viz": False}}
    return _other("heatmap", panel, shared, options, custom=hidden)


def _state_timeline(panel: StateTimeline, shared: Json) -> Any:
    return grafanalib.StateTimeline(
        **shared,
        showValue="never",
        mappings=value_mappings(panel.named),
        extraJson={
            "pluginVersion": PLUGIN_VERSION,
            "fieldConfig": {"defaults": defaults(panel)},
            "options": {"legend": NO_LEGEND, "tooltip": {"sort": "none"}},
        },
    )


def _table(panel: Table, shared: Json) -> Any:
    return grafanalib.Panel(
        **{**shared, "targets": table.targets(panel)},
        transformations=table.transformations(panel),
        extraJson={
            "type": "table",
            "pluginVersion": PLUGIN_VERSION,
            "fieldConfig": {
                "defaults": {
                    "custom": {"align": "auto", "cellOptions": {"type": "auto"}, "inspect": False},
                    **defaults(panel),
                },
                "overrides": table.overrides(panel),
            },
            "options": {
                "cellHeight": "sm",
                "showHeader": True,
                "sortBy": table.order(panel),
            },
        },
    ).panel_json({})


def _text(panel: Text, shared: Json) -> Any:
    return grafanalib.Text(
        **shared,
        content=panel.content,
        mode="markdown",
        extraJson={"pluginVersion": PLUGIN_VERSION},
    )


def _other(kind: str, panel: Panel, shared: Json, options: Json, custom: Json | None = None) -> Any:
    """Write a panel of which grafanalib knows only an old kind, or none."""
    return grafanalib.Panel(
        **shared,
        extraJson={
            "type": kind,
            "pluginVersion": PLUGIN_VERSION,
            "fieldConfig": {
                "defaults": {
                    **defaults(panel),
                    "color": {"mode": "thresholds"},
                    "custom": custom,
                },
                "overrides": overrides_by_color(panel),
            },
            "options": options,
        },
    ).panel_json({})


_DRAW: dict[type[Panel], Callable[[Any, Json], Any]] = {
    TimeSeries: _time_series,
    Stat: _stat,
    Gauge: _gauge,
    BarGauge: _bar_gauge,
    Heatmap: _heatmap,
    StateTimeline: _state_timeline,
    Table: _table,
    Text: _text,
}
