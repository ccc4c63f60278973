"""What Grafana reads of each kind of panel: options, scale, colors, overrides, queries and links.

Each example sets all that its kind can set, so that each value must be at its place.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from zerowatch.dashboards.grafana.dashboard import Dashboard, Row
from zerowatch.dashboards.grafana.dashboard_json import dashboard_json
from zerowatch.dashboards.grafana.links import Here, links_of_cell, links_of_series
from zerowatch.dashboards.grafana.panel_json import Place, panel_json
from zerowatch.dashboards.grafana.panels import (
    BarGauge,
    Column,
    Curve,
    Gauge,
    Heatmap,
    Named,
    Query,
    SeriesHeatmap,
    Stat,
    StateTimeline,
    Table,
    Text,
    TimeSeries,
    XYChart,
    above,
    below,
)
from zerowatch.metrics.catalog.training import RUN_ACTIVE
from zerowatch.metrics.catalog.tuner import TUNER_DECISIONS

HERE = Here("zerowatch-devices", ("job", "run", "node", "rank"))
PLACE = Place(left=3, top=5, width=7, height=11)
ALL: dict[str, Any] = {
    "title": "Title",
    "description": "How to read it.",
    "unit": "s",
    "minimum": 2,
    "maximum": 9,
    "decimals": 3,
    "empty": "nothing",
}
OF_RANKS = Query('up{rank=~"$rank"}', "rank {{rank}} {{node}}")
NOW = Query("down", "down", shape="now")
LIMIT = Query("most", "limit", is_limit=True)
STATES = (Named(1, "on", "blue"), Named(0, "off", "text"))
PANELS = {
    "graph of ranks": TimeSeries(
        **ALL,
        queries=(OF_RANKS, LIMIT),
        thresholds=above(4, 6),
        colors={"limit": "purple"},
        units={"limit": "bytes"},
        dashboard="zerowatch-step-anatomy",
    ),
    "stacked graph on a logarithmic scale": TimeSeries(
        **{**ALL, "maximum": None},
        queries=(Query("up", "up", exemplars=True),),
        thresholds=below(6, 4),
        stacked=True,
        log_scale=True,
    ),
    "figure": Stat(
        **ALL, queries=(NOW,), thresholds=above(4), plain=True, named=STATES, color="background"
    ),
    "figure with a name and a small graph": Stat(**ALL, queries=(Query("up", "{{kind}}"),)),
    "dial": Gauge(**ALL, queries=(NOW,), thresholds=above(4)),
    "bars": BarGauge(**ALL, queries=(NOW,), thresholds=above(4), colors={"down": "blue"}),
    "heatmap of a histogram": Heatmap(
        **ALL, queries=(Query("buckets", "{{le}}", shape="buckets"),)
    ),
    "heatmap of series": SeriesHeatmap(**ALL, queries=(OF_RANKS,), low_is_bad=True, max_points=70),
    "curves": XYChart(
        **ALL,
        curves=(
            Curve(name="A", x="steps_a", y="loss_a", color="blue"),
            Curve(name="B", x="steps_b", y="loss_b", color="orange"),
        ),
        x_title="step",
    ),
    "states over time": StateTimeline(**ALL, queries=(Query("up", "{{run}}"),), named=STATES),
    "table of runs": Table(
        **ALL,
        labels={"run": "Run", "job": "Job", "runbook_page": "Runbook", "page": "See"},
        columns=(
            Column(
                title="Share",
                expression="a",
                unit="percentunit",
                decimals=1,
                thresholds=above(1, 2),
            ),
            Column(title="State", expression="b", unit="none", named=STATES),
            Column(title="Bar", expression="c", unit="s", bar_until=1.5),
        ),
        sort_by="Share",
        after=("Runbook",),
        lower_case=("Runbook",),
        widths={"Run": 240, "Bar": 65},
    ),
    "table of one column without a heading": Table(
        **ALL, labels={"node": "Node", "rank": "Rank"}, columns=(Column(title="", expression="a"),)
    ),
    "words": Text(title="Title", description="How to read it.", content="Words."),
}
LAST = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
HIDDEN_LEGEND = {"calcs": [], "displayMode": "hidden", "placement": "bottom", "showLegend": False}
ORANGES = {
    "exponent": 0.5,
    "fill": "dark-orange",
    "mode": "scheme",
    "scale": "exponential",
    "scheme": "Oranges",
    "steps": 64,
}
CELLS = {
    "calculate": False,
    "legend": {"show": True},
    "rowsFrame": {"layout": "auto"},
    "showValue": "never",
}
FIGURE = {
    **LAST,
    "colorMode": "background",
    "graphMode": "none",
    "justifyMode": "auto",
    "orientation": "auto",
    "percentChangeColorMode": "standard",
    "showPercentChange": False,
    "textMode": "auto",
    "wideLayout": True,
}
OPTIONS = {
    "graph of ranks": {
        "legend": {
            "calcs": ["lastNotNull", "mean", "max"],
            "displayMode": "table",
            "placement": "bottom",
            "showLegend": True,
            "sortBy": "Last *",
            "sortDesc": True,
        },
        "tooltip": {"mode": "multi", "sort": "desc", "hideZeros": False},
    },
    "stacked graph on a logarithmic scale": {
        "legend": {
            "calcs": ["lastNotNull", "mean", "max"],
            "displayMode": "list",
            "placement": "bottom",
            "showLegend": True,
        },
        "tooltip": {"mode": "multi", "sort": "desc", "hideZeros": False},
    },
    "figure": FIGURE,
    "figure with a name and a small graph": {
        **FIGURE,
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "value_and_name",
    },
    "dial": {
        **LAST,
        "minVizHeight": 75,
        "minVizWidth": 75,
        "orientation": "auto",
        "showThresholdLabels": False,
        "showThresholdMarkers": True,
        "sizing": "auto",
    },
    "bars": {
        **LAST,
        "displayMode": "basic",
        "legend": HIDDEN_LEGEND,
        "maxVizHeight": 40,
        "minVizHeight": 16,
        "minVizWidth": 8,
        "namePlacement": "auto",
        "orientation": "horizontal",
        "showUnfilled": True,
        "sizing": "auto",
        "valueMode": "color",
    },
    "heatmap of a histogram": {
        **CELLS,
        "cellGap": 1,
        "color": {**ORANGES, "reverse": False},
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "tooltip": {"mode": "single", "showColorScale": True, "yHistogram": True},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": "s"},
    },
    "heatmap of series": {
        **CELLS,
        "cellGap": 0,
        "cellValues": {"unit": "s"},
        "color": {**ORANGES, "reverse": True, "min": 2, "max": 9},
        "tooltip": {"mode": "single", "showColorScale": True, "yHistogram": False},
        "yAxis": {"axisPlacement": "left", "reverse": True},
    },
    "curves": {
        "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True},
        "mapping": "manual",
        "series": [
            {
                "frame": {"matcher": {"id": "byIndex", "options": index}},
                "name": {"fixed": name},
                "x": {"matcher": {"id": "byName", "options": f"{name} step"}},
                "y": {"matcher": {"id": "byName", "options": name}},
            }
            for index in (0, 1)
            for name in ("A", "B")
        ],
        "tooltip": {"mode": "single", "sort": "none"},
    },
    "states over time": {
        "alignValue": "left",
        "legend": HIDDEN_LEGEND,
        "mergeValues": True,
        "rowHeight": 0.9,
        "showValue": "never",
        "tooltip": {"mode": "single", "sort": "none"},
    },
    "table of runs": {
        "cellHeight": "sm",
        "showHeader": True,
        "sortBy": [{"displayName": "Share", "desc": True}],
    },
    "table of one column without a heading": {
        "cellHeight": "sm",
        "showHeader": True,
        "sortBy": [],
    },
    "words": {"content": "Words.", "mode": "markdown"},
}
NO_HIDING = {"legend": False, "tooltip": False, "viz": False}
# What is drawn of each kind, beside what grafanalib adds.
CUSTOM = {
    "graph of ranks": {
        "drawStyle": "line",
        "fillOpacity": 8,
        "lineWidth": 1,
        "scaleDistribution": {"type": "linear"},
        "stacking": {"mode": "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed"},
    },
    "stacked graph on a logarithmic scale": {
        "axisSoftMax": pytest.approx(6.6),
        "drawStyle": "line",
        "fillOpacity": 70,
        "lineWidth": 0,
        "scaleDistribution": {"type": "log", "log": 10},
        "stacking": {"mode": "normal", "group": "A"},
        "thresholdsStyle": {"mode": "dashed"},
    },
    "heatmap of a histogram": {"hideFrom": NO_HIDING},
    "heatmap of series": {"hideFrom": NO_HIDING},
    "curves": {
        "axisLabel": "step",
        "fillOpacity": 50,
        "lineWidth": 1,
        "pointSize": {"fixed": 3},
        "show": "points+lines",
    },
    "table of runs": {"align": "auto", "cellOptions": {"type": "auto"}, "inspect": False},
}
BLUE_A = {"color": {"mode": "fixed", "fixedColor": "blue"}}
ORANGE_B = {"color": {"mode": "fixed", "fixedColor": "orange"}}
MAPPINGS = [
    {
        "type": "value",
        "options": {
            "1": {"text": "on", "color": "blue", "index": 0},
            "0": {"text": "off", "color": "text", "index": 1},
        },
    }
]
OVERRIDES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "graph of ranks": [
        ("limit", {"color": {"mode": "fixed", "fixedColor": "purple"}, "unit": "bytes"}),
        (
            "limit",
            {
                "color": {"mode": "fixed", "fixedColor": "red"},
                "custom.fillOpacity": 0,
                "custom.lineStyle": {"fill": "dash", "dash": [10, 10]},
                "custom.lineWidth": 1,
                "custom.stacking": {"mode": "none", "group": "A"},
            },
        ),
    ],
    "bars": [("down", BLUE_A)],
    "curves": [("A", BLUE_A), ("B", ORANGE_B)],
    "table of runs": [
        (
            "Share",
            {
                "unit": "percentunit",
                "decimals": 1,
                "thresholds": {
                    "mode": "absolute",
                    "steps": [
                        {"color": "green", "value": None},
                        {"color": "orange", "value": 1},
                        {"color": "red", "value": 2},
                    ],
                },
                "custom.cellOptions": {"type": "color-text"},
            },
        ),
        (
            "State",
            {
                "unit": "none",
                "mappings": MAPPINGS,
                "custom.cellOptions": {"type": "color-text"},
            },
        ),
        (
            "Bar",
            {
                "unit": "s",
                "min": 0,
                "max": 1.5,
                "custom.cellOptions": {
                    "type": "gauge",
                    "mode": "basic",
                    "valueDisplayMode": "text",
                },
            },
        ),
        (
            "Run",
            {
                "noValue": "-",
                "links": [
                    {
                        "title": "Overview, last 30 minutes",
                        "url": "/d/zerowatch-overview?${datasource:queryparam}"
                        "&var-job=${__data.fields.Job}&var-run=${__value.raw}"
                        "&from=now-30m&to=now",
                    },
                    {
                        "title": "Overview, whole run",
                        "url": "/d/zerowatch-overview?${datasource:queryparam}"
                        "&var-job=${__data.fields.Job}&var-run=${__value.raw}"
                        "&from=${__data.fields.Started.numeric}&to=${__data.fields.Seen.numeric}",
                    },
                ],
            },
        ),
        ("Job", {"noValue": "-"}),
        (
            "Runbook",
            {
                "noValue": "-",
                "links": [{"title": "What to do", "url": "${runbook}#${__value.raw}"}],
            },
        ),
        (
            "See",
            {
                "noValue": "-",
                "links": [
                    {
                        "title": "The dashboard with details",
                        "url": "/d/zerowatch-${__value.raw}?${datasource:queryparam}"
                        "&var-job=${__data.fields.Job}&var-run=${__data.fields.Run}"
                        "&${__url_time_range}",
                    }
                ],
            },
        ),
        ("Run", {"custom.width": 240}),
        ("Bar", {"custom.width": 65}),
    ],
}


def drawn(name: str) -> Any:
    return panel_json(PANELS[name], 17, PLACE, HERE)


@pytest.mark.parametrize("name", PANELS)
def test_every_kind_has_its_id_place_words_and_data_source(name: str) -> None:
    json = drawn(name)

    assert (json["id"], json["title"], json["description"]) == (17, "Title", "How to read it.")
    assert json["gridPos"] == {"x": 3, "y": 5, "w": 7, "h": 11}
    assert json["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.parametrize("name", PANELS)
def test_the_options_of_a_kind_are_those_of_its_plugin(name: str) -> None:
    assert drawn(name)["options"] == OPTIONS[name]


@pytest.mark.parametrize("name", [name for name in PANELS if name != "words"])
def test_the_scale_unit_and_text_of_no_data_are_the_panels_own(name: str) -> None:
    defaults = drawn(name)["fieldConfig"]["defaults"]
    scale = {key: defaults.get(key) for key in ("unit", "min", "max", "decimals", "noValue")}

    assert scale == {
        "unit": "s",
        "min": 2,
        "max": PANELS[name].maximum,
        "decimals": 3,
        "noValue": "nothing",
    }


@pytest.mark.parametrize("name", CUSTOM)
def test_a_kind_is_drawn_as_listed(name: str) -> None:
    custom = drawn(name)["fieldConfig"]["defaults"]["custom"]

    assert {key: value for key, value in custom.items() if key in CUSTOM[name]} == CUSTOM[name]


@pytest.mark.parametrize("name", ["figure", "dial", "bars", "curves", "states over time"])
def test_the_color_of_a_value_is_that_of_its_threshold(name: str) -> None:
    assert drawn(name)["fieldConfig"]["defaults"]["color"] == {"mode": "thresholds"}


@pytest.mark.parametrize("name", ["figure", "states over time"])
def test_texts_stand_for_values(name: str) -> None:
    assert drawn(name)["fieldConfig"]["defaults"]["mappings"] == MAPPINGS


@pytest.mark.parametrize("name", OVERRIDES)
def test_single_series_and_columns_have_their_own_options(name: str) -> None:
    found = drawn(name)["fieldConfig"]["overrides"]

    assert found == [
        {
            "matcher": {"id": "byName", "options": of},
            "properties": [{"id": key, "value": value} for key, value in options.items()],
        }
        for of, options in OVERRIDES[name]
    ]


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("graph of ranks", [("A", 'up{rank=~"$rank"}', "time_series", False)]),
        ("figure", [("A", "down", "time_series", True)]),
        ("heatmap of a histogram", [("A", "buckets", "heatmap", False)]),
        (
            "curves",
            [
                ("A", "steps_a", "time_series", False),
                ("B", "loss_a", "time_series", False),
                ("C", "steps_b", "time_series", False),
                ("D", "loss_b", "time_series", False),
            ],
        ),
        (
            "table of runs",
            [("A", "a", "table", True), ("B", "b", "table", True), ("C", "c", "table", True)],
        ),
    ],
)
def test_queries_are_sent_for_the_whole_range_or_for_now(
    name: str, targets: list[tuple[str, str, str, bool]]
) -> None:
    found = drawn(name)["targets"][: len(targets)]

    assert [
        (each["refId"], each["expr"], each["format"], each["instant"]) for each in found
    ] == targets
    assert [each["range"] for each in found] == [not is_now for *_, is_now in targets]
    assert all(each["editorMode"] == "code" for each in found)


def test_a_title_links_to_another_dashboard_with_all_choices() -> None:
    (link,) = drawn("graph of ranks")["links"]

    assert link["title"] == "More on the dashboard step anatomy"
    assert link["url"] == "/d/zerowatch-step-anatomy?${__all_variables}&${__url_time_range}"
    assert (link["type"], link["keepTime"], link["includeVars"]) == ("link", False, False)


def test_the_points_of_a_heatmap_of_series_are_limited_and_those_of_graphs_are_not() -> None:
    assert drawn("heatmap of series")["maxDataPoints"] == 70
    assert "maxDataPoints" not in drawn("graph of ranks")


def test_a_table_shows_labels_before_values_unless_they_come_last() -> None:
    merge, organize, lower = drawn("table of runs")["transformations"]

    assert merge == {"id": "merge", "options": {}}
    assert organize["options"] == {
        "excludeByName": {"Time": True},
        "indexByName": {
            "run": 0,
            "job": 1,
            "page": 2,
            "Value #A": 3,
            "Value #B": 4,
            "Value #C": 5,
            "runbook_page": 6,
        },
        "renameByName": {
            "run": "Run",
            "job": "Job",
            "page": "See",
            "Value #A": "Share",
            "Value #B": "State",
            "Value #C": "Bar",
            "runbook_page": "Runbook",
        },
    }
    assert lower == {
        "id": "formatString",
        "options": {"stringField": "Runbook", "outputFormat": "Lower Case"},
    }


def pane(url: str) -> Any:
    """Return what Grafana's Explore shows at an address."""
    parts = urlsplit(url)
    (panes,) = parse_qs(parts.query)["panes"]
    assert (parts.path, parse_qs(parts.query)["schemaVersion"]) == ("/explore", ["1"])
    return json.loads(panes)["zerowatch"]


def test_a_rank_leads_to_its_traces_and_reports_of_the_time_shown() -> None:
    rank, traces, reports, node = links_of_series(("node", "rank"), HERE)
    value = "${__field.labels.rank}"
    of_traces = f'{{ .zerowatch.run = "$run" && .zerowatch.rank = {value} }}'
    of_reports = f'{{run="$run", rank="{value}"}}'
    shown = {"from": "$__from", "to": "$__to"}
    kept = "${datasource:queryparam}&${job:queryparam}&${run:queryparam}"

    assert rank.url == f"/d/zerowatch-devices?{kept}&var-rank={value}&${{__url_time_range}}"
    assert node.url == (
        f"/d/zerowatch-devices?{kept}&var-node=${{__field.labels.node}}&${{__url_time_range}}"
    )
    assert pane(traces.url) == {
        "datasource": "tempo",
        "queries": [
            {
                "datasource": {"type": "tempo", "uid": "tempo"},
                "query": of_traces,
                "expr": of_traces,
                "refId": "A",
                "limit": 20,
                "queryType": "traceql",
                "tableType": "traces",
            }
        ],
        "range": shown,
    }
    assert pane(reports.url) == {
        "datasource": "loki",
        "queries": [
            {
                "datasource": {"type": "loki", "uid": "loki"},
                "query": of_reports,
                "expr": of_reports,
                "refId": "A",
                "queryType": "range",
            }
        ],
        "range": shown,
    }


def test_a_row_of_another_run_leads_to_the_rank_and_node_in_that_run() -> None:
    headings = ("Run", "Rank", "Node")
    rank, traces, _ = links_of_cell("rank", headings, HERE)
    (node,) = links_of_cell("node", headings, HERE)
    chosen = "${datasource:queryparam}&${job:queryparam}&var-run=${__data.fields.Run}"

    assert rank.url == (
        f"/d/zerowatch-step-anatomy?{chosen}&var-rank=${{__value.raw}}&${{__url_time_range}}"
    )
    assert node.url == (
        f"/d/zerowatch-devices?{chosen}&var-node=${{__value.raw}}&${{__url_time_range}}"
    )
    assert '"${__data.fields.Run}"' in pane(traces.url)["queries"][0]["query"]
    assert links_of_cell("phase", headings, HERE) == ()


def dashboard(**more: Any) -> Any:
    rank = Stat(title="A", description="B", queries=(Query('up{node="$node", rank="$rank"}', "a"),))
    page = Dashboard(
        **{"name": "a_run", "title": "A run", "description": "Why?", "rows": (), **more}
    )
    with_choices = replace(page, rows=(Row("Open", (rank,)),)) if page.about == "run" else page
    return dashboard_json(with_choices, "https://runbook")


def test_a_dashboard_has_its_title_time_range_and_refresh() -> None:
    json = dashboard(span="24h", refresh="1m")

    expected = {
        "title": "zerowatch / A run",
        "uid": "zerowatch-a-run",
        "description": "Why?",
        "tags": ["zerowatch"],
        "time": {"from": "now-24h", "to": "now"},
        "timezone": "browser",
        "refresh": "1m",
        "graphTooltip": 1,
        "schemaVersion": 39,
        "version": 1,
        "timepicker": {"refresh_intervals": ["5s", "15s", "30s", "1m", "5m", "30m", "1h"]},
    }
    assert {key: json[key] for key in expected} == expected


ACTIVE = RUN_ACTIVE.name
OF_JOBS = f'{ACTIVE}{{job=~"$job"}}'
OF_THE_JOB = f'{ACTIVE}{{job="$job"}}'
OF_RUN = f'{ACTIVE}{{job="$job", run="$run"}}'
OF_NODE = f'{ACTIVE}{{job="$job", run="$run", node=~"$node"}}'
OTHER = f'{ACTIVE}{{job=~"$job", run!="$run_a"}}'
# Name, title, query, order (1 alphabetical, 2 descending, 3 by number), and whether several values
# can be chosen.
VARIABLES: dict[str, list[tuple[str, str, str, int, bool]]] = {
    "run": [
        ("job", "Job", f"label_values({ACTIVE}, job)", 1, False),
        ("run", "Run", f"label_values({OF_THE_JOB}, run)", 2, False),
        ("node", "Node", f"label_values({OF_RUN}, node)", 1, True),
        ("rank", "Rank", f"label_values({OF_NODE}, rank)", 3, True),
    ],
    "runs": [("job", "Job", f"label_values({ACTIVE}, job)", 1, True)],
    "two runs": [
        ("job", "Job", f"label_values({ACTIVE}, job)", 1, True),
        ("run_a", "Run A", f"label_values({OF_JOBS}, run)", 2, False),
        ("run_b", "Run B", f"label_values({OTHER}, run)", 2, False),
    ],
}


@pytest.mark.parametrize("about", VARIABLES)
def test_what_can_be_chosen_depends_on_what_a_dashboard_is_about(about: str) -> None:
    source, runbook, *chosen = dashboard(about=about)["templating"]["list"]

    assert (source["name"], source["type"], source["query"]) == (
        *("datasource", "datasource", "prometheus"),
    )
    assert runbook == {
        "hide": 2,
        "name": "runbook",
        "query": "https://runbook",
        "type": "constant",
    }
    assert [
        (each["name"], each["label"], each["definition"], each["sort"], each["multi"])
        for each in chosen
    ] == VARIABLES[about]
    for each in chosen:
        assert each["query"] == {
            "qryType": 1,
            "query": each["definition"],
            "refId": f"variable-{each['name']}",
        }
        assert (each["type"], each["refresh"], each["hide"]) == ("query", 2, 0)
        assert each["includeAll"] == each["multi"]
        everything = {"selected": True, "text": ["All"], "value": ["$__all"]}
        assert (each.get("allValue"), each.get("current")) == (
            (".*", everything) if each["multi"] else (None, None)
        )


def test_graphs_of_a_run_mark_alerts_decisions_and_starts() -> None:
    built_in, *found = dashboard()["annotations"]["list"]
    run = 'job="$job", run="$run"'
    firing = f'ALERTS{{{run}, alertstate="firing"}}'
    process = f'process_start_time_seconds{{{run}, rank="0"}}'
    decisions = f'{TUNER_DECISIONS.name}{{{run}, rank="0"}}'

    def latest(series: str) -> str:
        return f"last_over_time({series}[$__interval])"

    def before(series: str) -> str:
        return f"{latest(series)} == last_over_time({series}[1h] offset $__interval)"

    assert (built_in["builtIn"], built_in["enable"], built_in["hide"]) == (1, True, True)
    keys = ("name", "expr", "iconColor", "titleFormat", "textFormat", "tagKeys", "step")
    assert [tuple(each[key] for key in keys) for each in found] == [
        (
            "Alerts",
            f"{firing} or last_over_time({firing}[$__interval])",
            "red",
            "{{alertname}}",
            "{{severity}} {{rank}}",
            "component,severity",
            "15s",
        ),
        (
            "Tuner",
            f"{latest(decisions)} > 0 unless {before(decisions)}",
            "purple",
            "Tuner: {{verdict}}",
            "See the dashboard Tuner for what it changed.",
            "verdict",
            "15s",
        ),
        (
            "Starts",
            f"{latest(process)} unless {before(process)}",
            "blue",
            "Run starts",
            "{{run}}",
            "node",
            "15s",
        ),
    ]
    assert all(each["enable"] and not each["hide"] for each in found)


@pytest.mark.parametrize("about", ["runs", "two runs"])
def test_other_dashboards_mark_nothing_and_their_links_keep_no_run(about: str) -> None:
    page = dashboard(about=about)

    assert [each["name"] for each in page["annotations"]["list"]] == ["Annotations & Alerts"]
    (link,) = page["links"]
    assert (link["includeVars"], link["keepTime"]) == (False, False)


def test_dashboards_of_a_run_link_to_each_other_and_to_its_traces() -> None:
    others, traces = dashboard(traces=('{ .zerowatch.run = "$run" }',))["links"]

    assert (others["type"], others["tags"], others["icon"]) == (
        *("dashboards", ["zerowatch"], "dashboard"),
    )
    assert (others["includeVars"], others["keepTime"]) == (True, True)
    assert (traces["type"], traces["title"], traces["icon"], traces["keepTime"]) == (
        *("link", "Traces", "external link", False),
    )
    assert pane(traces["url"])["queries"][0]["query"] == '{ .zerowatch.run = "$run" }'
