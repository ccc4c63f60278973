"""Converts each kind of panel to Grafana's JSON.

The gauge, bar gauge, heatmap and table of grafanalib 0.7.1 are those of Grafana 6, and current
Grafana ignores their options. The options of these panels are therefore written here, on top of
grafanalib's plain panel.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from grafanalib import core as grafanalib

from ..promql import IDENTITY
from .grafanalib_cleanup import STALE_OF_PANEL, STALE_OF_TARGET, Json, cleaned
from .links import Here, links_of_cell, links_of_series
from .panels import (
    BAD,
    BarGauge,
    Column,
    Gauge,
    Heatmap,
    Link,
    Named,
    Panel,
    Query,
    SeriesHeatmap,
    Stat,
    StateTimeline,
    Table,
    Text,
    TimeSeries,
    XYChart,
)

# The data source that is chosen at the top of the dashboard.
PROMETHEUS = {"type": "prometheus", "uid": "${datasource}"}
# The result format of a query, by the shape of its result.
_FORMATS = {"series": "time_series", "now": "time_series", "buckets": "heatmap", "table": "table"}
# A panel without a version is migrated from Grafana 6, which changes it.
PLUGIN_VERSION = "11.6.0"
# Show the latest value of each series.
LAST = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
# The figures of a series in the legend of a graph; a table of several series is sorted by the last.
CALCULATIONS = ["lastNotNull", "mean", "max"]
SORTED_BY = "Last *"  # Grafana's name of "lastNotNull" in a legend
NO_LEGEND = {"calcs": [], "displayMode": "hidden", "placement": "bottom", "showLegend": False}


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a panel, in columns and rows from the upper left corner of the dashboard."""

    left: int
    top: int
    width: int
    height: int


def panel_json(panel: Panel, number: int, place: Place, here: Here) -> Json:
    """Return the JSON of a panel.

    Args:
        panel: The panel.
        number: Its id, unique on the dashboard.
        place: Its position.
        here: The dashboard of the panel.
    """
    convert = _CONVERTERS[type(panel)]
    result = cleaned(convert(panel, _shared(panel, number, place)), STALE_OF_PANEL)
    fields = result["fieldConfig"]
    fields.setdefault("overrides", [])
    if not fields["defaults"]["thresholds"]["steps"]:
        del fields["defaults"]["thresholds"]
    if isinstance(panel, Table):
        fields["overrides"] += [*_label_columns(panel, here), *_column_widths(panel)]
    elif links := links_of_series(_labels_of_legends(panel), here):
        fields["defaults"]["links"] = _links_json(links)
    if isinstance(panel, SeriesHeatmap):
        result["maxDataPoints"] = panel.max_points
    return {key: value for key, value in result.items() if value != []}


def row_json(title: str, number: int, place: Place, hidden: Iterable[Json] | None) -> Json:
    """Return the JSON of a heading.

    Args:
        title: The heading.
        number: Its id, unique on the dashboard.
        place: Its position.
        hidden: The panels of a collapsed row. Those of an open row follow it in the dashboard, and
            `hidden` is None.
    """
    row = grafanalib.RowPanel(title=title, id=number, gridPos=_position(place))
    wanted = {"collapsed", "gridPos", "id", "panels", "title", "type"}
    result = {key: value for key, value in cleaned(row).items() if key in wanted}
    return {**result, "collapsed": hidden is not None, "panels": list(hidden or ())}


def _shared(panel: Panel, number: int, place: Place) -> Json:
    """Return the arguments that grafanalib takes for every kind of panel."""
    return {
        "id": number,
        "title": panel.title,
        "description": panel.description,
        "gridPos": _position(place),
        "dataSource": PROMETHEUS,
        "targets": [_query_target(query, index) for index, query in enumerate(panel.queries)],
        "thresholds": [{"color": step.color, "value": step.value} for step in panel.thresholds],
        "links": [_link_to_dashboard(panel.dashboard)] if panel.dashboard else [],
    }


def _position(place: Place) -> Any:
    return grafanalib.GridPos(h=place.height, w=place.width, x=place.left, y=place.top)


def _time_series(panel: TimeSeries, shared: Json) -> Any:
    scale = {"type": "log", "log": 10} if panel.log_scale else {"type": "linear", "log": None}
    custom = {"scaleDistribution": scale, "axisSoftMax": _soft_maximum(panel)}
    return grafanalib.TimeSeries(
        **shared,
        fillOpacity=70 if panel.stacked else 8,
        lineWidth=0 if panel.stacked else 1,
        stacking={"mode": "normal" if panel.stacked else "none", "group": "A"},
        thresholdsStyleMode="dashed" if panel.thresholds else "off",
        tooltipMode="multi",
        tooltipSort="desc",
        overrides=[*_series_overrides(panel), *_limit_overrides(panel)],
        extraJson={
            "pluginVersion": PLUGIN_VERSION,
            "fieldConfig": {"defaults": {**_defaults(panel), "custom": custom}},
            "options": {"legend": _legend(panel), "tooltip": {"hideZeros": False}},
        },
    )


def _legend(panel: Panel) -> Json:
    """Return a table of figures of several series; figures in a line of a single series."""
    is_single = len(panel.queries) == 1 and not _labels_of_legends(panel)
    if is_single:
        return {
            "calcs": CALCULATIONS,
            "displayMode": "list",
            "placement": "bottom",
            "showLegend": True,
        }
    return {
        "calcs": CALCULATIONS,
        "displayMode": "table",
        "placement": "bottom",
        "showLegend": True,
        "sortBy": SORTED_BY,
        "sortDesc": True,
    }


def _labels_of_legends(panel: Panel) -> set[str]:
    """Return the labels that the names of series contain."""
    return {label for query in panel.queries for label in re.findall(r"{{(\w+)}}", query.legend)}


def _soft_maximum(panel: TimeSeries) -> float | None:
    """Return the least upper end of the axis, so that the highest threshold is visible."""
    limits = [step.value for step in panel.thresholds if step.value]
    return max(limits) * 1.1 if limits and panel.maximum is None else None


def _stat(panel: Stat, shared: Json) -> Any:
    return grafanalib.Stat(
        **shared,
        reduceCalc="lastNotNull",
        noValue=None,  # the default of grafanalib is the text "none"
        colorMode=panel.color,
        graphMode="none" if panel.plain else "area",
        textMode=_text_mode(panel),
        overrides=_series_overrides(panel),
        extraJson={
            "pluginVersion": PLUGIN_VERSION,
            "fieldConfig": {
                "defaults": {
                    **_defaults(panel),
                    "color": {"mode": "thresholds"},
                    "mappings": _value_mappings(panel.named),
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
    """Show the name of a single value only if the name comes from a label.

    Grafana's "auto" names values only if there are several.
    """
    is_label = any("{{" in query.legend for query in panel.queries)
    return "value_and_name" if is_label else "auto"


def _gauge(panel: Gauge, shared: Json) -> Any:
    return _plain_panel(
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
    return _plain_panel(
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
    return _plain_panel("heatmap", panel, shared, options, custom=hidden)


def _series_heatmap(panel: SeriesHeatmap, shared: Json) -> Any:
    options = {
        "calculate": False,
        "cellGap": 0,
        "cellValues": {"unit": panel.unit},
        "color": {
            "exponent": 0.5,
            "fill": "dark-orange",
            "max": panel.maximum,
            "min": panel.minimum,
            "mode": "scheme",
            "reverse": panel.low_is_bad,
            "scale": "exponential",
            "scheme": "Oranges",
            "steps": 64,
        },
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "showColorScale": True, "yHistogram": False},
        "yAxis": {"axisPlacement": "left", "reverse": True},
    }
    hidden = {"hideFrom": {"legend": False, "tooltip": False, "viz": False}}
    return _plain_panel("heatmap", panel, shared, options, custom=hidden)


def _xy_chart(panel: XYChart, shared: Json) -> Any:
    """Each curve becomes a frame of two fields, joined by time, of which one is the x axis."""
    letters = [(_letter(2 * index), _letter(2 * index + 1)) for index in range(len(panel.curves))]
    queries = [
        Query(expression, f"{curve.name} {axis}".strip())
        for curve in panel.curves
        for expression, axis in ((curve.x, panel.x_title), (curve.y, ""))
    ]
    options = {
        "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True},
        "mapping": "manual",
        "series": [
            {
                "frame": {"matcher": {"id": "byIndex", "options": index}},
                "name": {"fixed": curve.name},
                "x": {"matcher": {"id": "byName", "options": f"{curve.name} {panel.x_title}"}},
                "y": {"matcher": {"id": "byName", "options": curve.name}},
            }
            # Grafana selects frames by number only, and a curve without data has no frame.
            for index in range(len(panel.curves))
            for curve in panel.curves
        ],
        "tooltip": {"mode": "single", "sort": "none"},
    }
    custom = {
        "axisLabel": panel.x_title,
        "fillOpacity": 50,
        "lineWidth": 1,
        "pointSize": {"fixed": 3},
        "show": "points+lines",
    }
    colored = replace(panel, colors={curve.name: curve.color for curve in panel.curves})
    targets = [_query_target(query, index) for index, query in enumerate(queries)]
    result = _plain_panel(
        "xychart", colored, {**shared, "targets": targets}, options, custom=custom
    )
    # A step in which one of the two has no value is no point of the curve.
    result["transformations"] = [
        {
            "filter": {"id": "byRefId", "options": f"/^(?:{x}|{y})$/"},
            "id": "joinByField",
            "options": {"byField": "Time", "mode": "inner"},
        }
        for x, y in letters
    ]
    return result


def _state_timeline(panel: StateTimeline, shared: Json) -> Any:
    return grafanalib.StateTimeline(
        **shared,
        showValue="never",
        mappings=_value_mappings(panel.named),
        extraJson={
            "pluginVersion": PLUGIN_VERSION,
            "fieldConfig": {"defaults": _defaults(panel)},
            "options": {"legend": NO_LEGEND, "tooltip": {"sort": "none"}},
        },
    )


def _table(panel: Table, shared: Json) -> Any:
    return grafanalib.Panel(
        **{**shared, "targets": _table_targets(panel)},
        transformations=_table_transformations(panel),
        extraJson={
            "type": "table",
            "pluginVersion": PLUGIN_VERSION,
            "fieldConfig": {
                "defaults": {
                    "custom": {"align": "auto", "cellOptions": {"type": "auto"}, "inspect": False},
                    **_defaults(panel),
                },
                "overrides": _table_overrides(panel),
            },
            "options": {
                "cellHeight": "sm",
                "showHeader": True,
                "sortBy": _table_order(panel),
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


def _plain_panel(
    kind: str, panel: Panel, shared: Json, options: Json, custom: Json | None = None
) -> Any:
    """Return a kind of panel that grafanalib supports only in an old form, or not at all."""
    return grafanalib.Panel(
        **shared,
        extraJson={
            "type": kind,
            "pluginVersion": PLUGIN_VERSION,
            "fieldConfig": {
                "defaults": {
                    **_defaults(panel),
                    "color": {"mode": "thresholds"},
                    "custom": custom,
                },
                "overrides": _series_overrides(panel),
            },
            "options": options,
        },
    ).panel_json({})


def _link_to_dashboard(uid: str) -> Json:
    """Return the link of a panel to another dashboard; it keeps the variables and time range."""
    return cleaned(
        grafanalib.DashboardLink(
            type="link",
            title=f"More on the dashboard {uid.removeprefix('zerowatch-').replace('-', ' ')}",
            uri=f"/d/{uid}?${{__all_variables}}&${{__url_time_range}}",
            icon="dashboard",
            keepTime=False,
        )
    )


def _defaults(panel: Panel) -> Json:
    """Return the options that apply to all values of a panel."""
    return {
        "unit": panel.unit,
        "min": panel.minimum,
        "max": panel.maximum,
        "decimals": panel.decimals,
        "noValue": panel.empty or None,
    }


def _series_overrides(panel: Panel) -> list[Json]:
    """Return the overrides that give single series their colors and units."""
    colors: dict[str, Json] = {
        legend: {"color": {"mode": "fixed", "fixedColor": color}}
        for legend, color in panel.colors.items()
    }
    units: dict[str, Json] = {legend: {"unit": unit} for legend, unit in panel.units.items()}
    return [
        _override(legend, {**colors.get(legend, {}), **units.get(legend, {})})
        for legend in sorted(colors.keys() | units.keys())
    ]


def _links_json(links: Iterable[Link]) -> list[Json]:
    return [{"title": link.title, "url": link.url} for link in links]


def _column_widths(panel: Table) -> list[Json]:
    return [_override(heading, {"custom.width": width}) for heading, width in panel.widths.items()]


def _label_columns(panel: Table, here: Here) -> list[Json]:
    """Return the overrides of the columns of labels: their links, and a dash if there is none."""
    headings = set(panel.labels.values())
    found = {
        heading: links_of_cell(label, headings, here) for label, heading in panel.labels.items()
    }
    return [
        _override(heading, {"noValue": "-", **({"links": _links_json(links)} if links else {})})
        for heading, links in found.items()
        if heading
    ]


def _limit_overrides(panel: Panel) -> list[Json]:
    """Return the overrides that draw limits as dashed lines, outside of any stack."""
    dashed = {
        "color": {"mode": "fixed", "fixedColor": BAD},
        "custom.fillOpacity": 0,
        "custom.lineStyle": {"fill": "dash", "dash": [10, 10]},
        "custom.lineWidth": 1,
        "custom.stacking": {"mode": "none", "group": "A"},
    }
    return [_override(query.legend, dashed) for query in panel.queries if query.is_limit]


def _override(name: str, properties: Json) -> Json:
    return {
        "matcher": {"id": "byName", "options": name},
        "properties": [{"id": key, "value": value} for key, value in properties.items()],
    }


def _value_mappings(named: Iterable[Named]) -> list[Json]:
    """Return the texts and colors shown in place of values."""
    options = {
        str(name.value): {"text": name.text, "color": name.color, "index": index}
        for index, name in enumerate(named)
    }
    return [{"type": "value", "options": options}] if options else []


def _query_target(query: Query, index: int) -> Json:
    """Return the JSON of a query; `index` is its number within the panel, from 0."""
    return _target(
        query.expression,
        index,
        shape=query.shape,
        legendFormat=query.legend,
        exemplar=query.exemplars or None,
    )


def _table_target(expression: str, index: int) -> Json:
    """Return the JSON of a query whose current values fill a column of a table."""
    return _target(expression, index, shape="table", legendFormat="__auto")


def _letter(index: int) -> str:
    """Return the name of a query within its panel: A, B and so on."""
    return string.ascii_uppercase[index]


def _target(expression: str, index: int, *, shape: str, **more: Any) -> Json:
    is_instant = shape in {"now", "table"}
    made = grafanalib.Target(
        expr=expression,
        refId=_letter(index),
        format=_FORMATS[shape],
        instant=is_instant,
        legendFormat=more["legendFormat"],
        datasource=PROMETHEUS,
    )
    current_keys = {
        "editorMode": "code",
        "exemplar": more.get("exemplar"),
        "range": not is_instant,
    }
    return cleaned({**cleaned(made, STALE_OF_TARGET), **current_keys})


def _table_targets(panel: Table) -> list[Json]:
    """Return the query of each column."""
    return [_table_target(column.expression, index) for index, column in enumerate(panel.columns)]


def _table_transformations(panel: Table) -> list[Json]:
    """Return the steps that join the results of all columns by their labels into one table.

    They also set the headings and the order of the columns, and hide the other fields.
    """
    values = _names_of_values(panel)
    titles = [column.title for column in panel.columns]
    heads = {
        **{label: head for label, head in panel.labels.items() if head not in panel.after},
        **dict(zip(values, titles, strict=True)),
        **{label: head for label, head in panel.labels.items() if head in panel.after},
    }
    return [
        {"id": "merge", "options": {}},
        {
            "id": "organize",
            "options": {
                "excludeByName": dict.fromkeys(_hidden(heads), True),
                "indexByName": {name: index for index, name in enumerate(heads)},
                "renameByName": {name: head for name, head in heads.items() if head},
            },
        },
        *(
            {"id": "formatString", "options": {"stringField": head, "outputFormat": "Lower Case"}}
            for head in panel.lower_case
        ),
    ]


def _table_order(panel: Table) -> list[Json]:
    """Return the column by which the rows are sorted, and the direction."""
    return [{"displayName": panel.sort_by, "desc": not panel.ascending}] if panel.sort_by else []


def _table_overrides(panel: Table) -> list[Json]:
    """Return the unit and colors of each column."""
    return [
        _override(column.title, _column_options(column)) for column in panel.columns if column.title
    ]


def _column_options(column: Column) -> Json:
    options: Json = {"unit": column.unit}
    if column.decimals is not None:
        options["decimals"] = column.decimals
    if column.thresholds:
        steps = [{"color": step.color, "value": step.value} for step in column.thresholds]
        options["thresholds"] = {"mode": "absolute", "steps": steps}
        options["custom.cellOptions"] = {"type": "color-text"}
    if column.named:
        options["mappings"] = _value_mappings(column.named)
        options["custom.cellOptions"] = {"type": "color-text"}
    if column.bar_until:
        options["min"] = 0
        options["max"] = column.bar_until
        options["custom.cellOptions"] = {
            "type": "gauge",
            "mode": "basic",
            "valueDisplayMode": "text",
        }
    return options


def _names_of_values(panel: Table) -> list[str]:
    """Return the names that Grafana gives to the value fields of the queries.

    The field of a single query is "Value"; those of several queries are "Value #A" and so on.
    """
    if len(panel.columns) == 1:
        return ["Value"]
    return [f"Value #{_letter(index)}" for index in range(len(panel.columns))]


def _hidden(heads: Mapping[str, str]) -> list[str]:
    """Return the fields that are not shown: the time, and those without a heading."""
    return [name for name in ("Time", *IDENTITY, *heads) if not heads.get(name)]


_CONVERTERS: dict[type[Panel], Callable[[Any, Json], Any]] = {
    TimeSeries: _time_series,
    Stat: _stat,
    Gauge: _gauge,
    BarGauge: _bar_gauge,
    Heatmap: _heatmap,
    SeriesHeatmap: _series_heatmap,
    XYChart: _xy_chart,
    StateTimeline: _state_timeline,
    Table: _table,
    Text: _text,
}
