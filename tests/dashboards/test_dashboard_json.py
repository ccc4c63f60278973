"""Tests of the JSON of panels and dashboards: it has no obsolete keys of grafanalib."""

from __future__ import annotations

import pytest

from zerowatch.dashboards.grafana.dashboard import Dashboard, Row
from zerowatch.dashboards.grafana.dashboard_json import dashboard_json, places
from zerowatch.dashboards.grafana.panels import (
    BarGauge,
    Column,
    Curve,
    Gauge,
    Heatmap,
    Named,
    Panel,
    Query,
    SeriesHeatmap,
    Stat,
    StateTimeline,
    Step,
    Table,
    Text,
    TimeSeries,
    XYChart,
    above,
    below,
)

QUERY = Query("up", "up")
WORDS = {"title": "Title", "description": "How to read it."}
KINDS = {
    "timeseries": TimeSeries(**WORDS, queries=(QUERY,)),
    "stat": Stat(**WORDS, queries=(QUERY,)),
    "gauge": Gauge(**WORDS, queries=(QUERY,)),
    "bargauge": BarGauge(**WORDS, queries=(QUERY,)),
    "heatmap": Heatmap(**WORDS, queries=(Query("up", "{{le}}", shape="buckets"),)),
    "state-timeline": StateTimeline(**WORDS, queries=(QUERY,)),
    "xychart": XYChart(
        **WORDS, curves=(Curve(name="A", x="steps", y="loss", color="blue"),), x_title="step"
    ),
    "table": Table(
        **WORDS, labels={"rank": "Rank"}, columns=(Column(title="Up", expression="up"),)
    ),
    "text": Text(**WORDS, content="Words."),
}


def page_of(*rows: Row, **more):
    """Return the JSON of a dashboard with these rows."""
    dashboard = Dashboard(name="a_b", title="Title", description="Why.", rows=rows, **more)
    return dashboard_json(dashboard, "https://runbook")


def drawn(*panels: Panel):
    """Return the JSON of panels on a dashboard, without their heading."""
    return page_of(Row("Row", panels))["panels"][1:]


def overrides(json, name):
    """Return the properties that the overrides of a panel set for a series or column."""
    return {
        item["id"]: item["value"]
        for override in json["fieldConfig"]["overrides"]
        if override["matcher"]["options"] == name
        for item in override["properties"]
    }


def keys_and_values(value):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key, inner
            yield from keys_and_values(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys_and_values(inner)


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_panel_has_obsolete_keys(kind):
    (json,) = drawn(KINDS[kind])

    stale = {"maxDataPoints", "intervalFactor", "cacheTimeout", "span", "minSpan", "op", "yaxis"}
    assert json["type"] == kind
    assert json["pluginVersion"] == "11.6.0"
    assert stale.isdisjoint(key for key, _ in keys_and_values(json))
    assert [key for key, value in keys_and_values(json) if value is None and key != "value"] == []


@pytest.mark.parametrize("kind", ["stat", "gauge", "bargauge"])
def test_the_calculation_stands_where_grafana_reads_it(kind):
    (json,) = drawn(KINDS[kind])

    assert json["options"]["reduceOptions"]["calcs"] == ["lastNotNull"]


def test_a_value_that_is_missing_is_not_the_word_none():
    plain, spoken = drawn(KINDS["stat"], Stat(**WORDS, queries=(QUERY,), empty="no GPU"))

    assert "noValue" not in plain["fieldConfig"]["defaults"]
    assert spoken["fieldConfig"]["defaults"]["noValue"] == "no GPU"


def test_the_lowest_threshold_is_null_and_not_a_word():
    (json,) = drawn(Stat(**WORDS, queries=(QUERY,), thresholds=above(0.2)))

    assert json["fieldConfig"]["defaults"]["thresholds"] == {
        "mode": "absolute",
        "steps": [{"color": "green", "value": None}, {"color": "red", "value": 0.2}],
    }


def test_thresholds_ascend_whichever_side_is_bad():
    assert above(1, 2) == (Step("green"), Step("orange", 1), Step("red", 2))
    assert below(2, 1) == (Step("red"), Step("orange", 1), Step("green", 2))


def test_thresholds_of_a_graph_are_drawn_as_lines():
    lines, parts = drawn(
        TimeSeries(**WORDS, queries=(QUERY,), thresholds=above(0.5), minimum=0.5),
        TimeSeries(**WORDS, queries=(QUERY,), stacked=True, log_scale=True),
    )

    custom = lines["fieldConfig"]["defaults"]["custom"]
    assert custom["thresholdsStyle"] == {"mode": "dashed"}
    assert custom["scaleDistribution"] == {"type": "linear"}
    assert lines["fieldConfig"]["defaults"]["min"] == 0.5
    assert parts["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    assert parts["fieldConfig"]["defaults"]["custom"]["scaleDistribution"]["log"] == 10


def test_queries_are_named_by_letters_and_are_range_or_instant_queries():
    (json,) = drawn(
        TimeSeries(**WORDS, queries=(Query("a", "a", exemplars=True), Query("b", "b", "now")))
    )

    over_time, now = json["targets"]
    assert (over_time["refId"], now["refId"]) == ("A", "B")
    assert (over_time["range"], over_time["instant"], over_time["exemplar"]) == (True, False, True)
    assert (now["range"], now["instant"]) == (False, True)
    assert "exemplar" not in now


def test_a_table_joins_its_queries_by_label_and_names_the_columns():
    (json,) = drawn(
        Table(
            **WORDS,
            labels={"rank": "Rank"},
            columns=(
                Column(title="Risk", expression="a", unit="percentunit", thresholds=above(0.5)),
                Column(title="Time", expression="b", unit="s", decimals=1),
            ),
            sort_by="Risk",
        )
    )

    organize = json["transformations"][1]["options"]
    assert [target["format"] for target in json["targets"]] == ["table", "table"]
    assert organize["renameByName"] == {"rank": "Rank", "Value #A": "Risk", "Value #B": "Time"}
    assert organize["excludeByName"] == {"Time": True, "job": True, "run": True}
    assert [override["matcher"]["options"] for override in json["fieldConfig"]["overrides"]] == [
        "Risk",
        "Time",
        "Rank",
    ]
    assert json["options"]["sortBy"] == [{"displayName": "Risk", "desc": True}]


def test_a_table_can_be_sorted_with_the_smallest_value_first():
    columns = (Column(title="Busy", expression="busy"),)
    (json,) = drawn(Table(**WORDS, labels={}, columns=columns, sort_by="Busy", ascending=True))

    assert json["options"]["sortBy"] == [{"displayName": "Busy", "desc": False}]


def test_a_single_value_is_named_only_if_its_legend_has_a_label():
    named, nameless = drawn(
        Stat(**WORDS, queries=(Query("ooms", "{{outcome}}"),)), Stat(**WORDS, queries=(QUERY,))
    )

    assert named["options"]["textMode"] == "value_and_name"
    assert nameless["options"]["textMode"] == "auto"


def test_the_axis_of_a_graph_includes_its_thresholds_unless_its_maximum_is_fixed():
    free, fixed = drawn(
        TimeSeries(**WORDS, queries=(QUERY,), thresholds=above(0.2)),
        TimeSeries(**WORDS, queries=(QUERY,), thresholds=above(0.2), maximum=1),
    )

    assert free["fieldConfig"]["defaults"]["custom"]["axisSoftMax"] == pytest.approx(0.22)
    assert "axisSoftMax" not in fixed["fieldConfig"]["defaults"]["custom"]


def test_a_limit_is_drawn_as_a_dashed_line_outside_of_the_stack():
    limit = Query("vector(0.2)", "limit", is_limit=True)

    (json,) = drawn(TimeSeries(**WORDS, queries=(QUERY, limit), stacked=True))

    (override,) = json["fieldConfig"]["overrides"]
    properties = {each["id"]: each["value"] for each in override["properties"]}
    assert override["matcher"] == {"id": "byName", "options": "limit"}
    assert properties["custom.lineStyle"] == {"fill": "dash", "dash": [10, 10]}
    assert properties["custom.stacking"]["mode"] == "none"


def test_a_table_with_an_untitled_column_hides_its_values():
    (json,) = drawn(
        Table(
            **WORDS,
            labels={"alertname": "Alert"},
            columns=(Column(title="", expression="ALERTS"),),
        )
    )

    assert json["transformations"][1]["options"]["excludeByName"]["Value"] is True


def test_values_can_be_shown_as_texts_and_series_in_fixed_colors():
    states, lines = drawn(
        StateTimeline(**WORDS, queries=(QUERY,), named=(Named(1, "on", "blue"),)),
        TimeSeries(**WORDS, queries=(QUERY,), colors={"up": "blue"}),
    )

    assert states["fieldConfig"]["defaults"]["mappings"] == [
        {"type": "value", "options": {"1": {"text": "on", "color": "blue", "index": 0}}}
    ]
    assert lines["fieldConfig"]["overrides"][0]["matcher"] == {"id": "byName", "options": "up"}


def test_the_schema_version_keeps_the_shared_crosshair():
    json = dashboard_json(Dashboard(name="a_b", title="Title", description="Why.", rows=()))

    assert (json["schemaVersion"], json["graphTooltip"]) == (39, 1)
    assert json["uid"] == "zerowatch-a-b"
    assert {"rows", "style", "__inputs", "sharedCrosshair"}.isdisjoint(json)


def test_runs_are_listed_newest_first_and_all_ranks_are_chosen_by_default():
    by_rank = Stat(**WORDS, queries=(Query('max(up{rank=~"$rank"})', "up"),))
    json = page_of(Row("Row", (by_rank,)))

    source, _, _, run, rank = json["templating"]["list"]
    assert source["type"] == "datasource"
    assert (run["sort"], run["multi"], run["includeAll"]) == (2, False, False)
    assert "current" not in run, "Grafana takes the first, which is the newest"
    assert (rank["sort"], rank["multi"], rank["allValue"]) == (3, True, ".*")
    assert rank["current"]["value"] == ["$__all"]


def test_panels_are_placed_from_left_to_right_and_wrap():
    wide = Stat(**WORDS, width=16, height=4)
    narrow = Stat(**WORDS, width=8, height=9)

    found = [(place.left, place.top) for place in places((wide, narrow, narrow, wide), top=1)]

    assert found == [(0, 1), (16, 1), (0, 10), (8, 10)]


def test_a_panel_wider_than_the_dashboard_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="'Title': width 25, allowed is 1 to 24"):
        list(places((Stat(**WORDS, width=25),), top=0))


def test_a_collapsed_row_holds_its_panels_and_the_next_row_follows_it_directly():
    panel = Stat(**WORDS, queries=(QUERY,), height=7)
    first, second, shown = page_of(Row("Details", (panel,), collapsed=True), Row("Next", (panel,)))[
        "panels"
    ]

    assert (first["collapsed"], len(first["panels"])) == (True, 1)
    assert (second["collapsed"], second["panels"]) == (False, [])
    assert (first["gridPos"]["y"], second["gridPos"]["y"], shown["gridPos"]["y"]) == (0, 1, 2)
    assert first["panels"][0]["gridPos"]["y"] == 1
    assert [first["id"], first["panels"][0]["id"], second["id"], shown["id"]] == [1, 2, 3, 4]


def test_the_legend_of_several_series_is_a_table_sorted_by_the_last_value():
    several, single = drawn(
        TimeSeries(**WORDS, queries=(Query("up", "rank {{rank}}"),)),
        TimeSeries(**WORDS, queries=(QUERY,)),
    )

    legend = several["options"]["legend"]
    assert (legend["displayMode"], legend["calcs"]) == ("table", ["lastNotNull", "mean", "max"])
    assert (legend["sortBy"], legend["sortDesc"]) == ("Last *", True)
    assert single["options"]["legend"]["displayMode"] == "list"


def test_series_and_cells_of_a_rank_link_to_the_rank_its_node_traces_and_reports():
    series, table = drawn(
        TimeSeries(**WORDS, queries=(Query("up", "rank {{rank}} {{node}}"),)),
        Table(
            **WORDS,
            labels={"rank": "Rank", "node": "Node"},
            columns=(Column(title="Up", expression="up"),),
        ),
    )

    of_series = {link["title"]: link["url"] for link in series["fieldConfig"]["defaults"]["links"]}
    rank = "${__field.labels.rank}"
    assert (
        f"/d/zerowatch-step-anatomy?${{datasource:queryparam}}&${{job:queryparam}}&${{run:queryparam}}&var-rank={rank}&"
        in of_series[f"Rank {rank}"]
    )
    assert rank in of_series[f"Traces of rank {rank}"]
    assert rank in of_series[f"Reports of rank {rank}"]
    assert "var-node=${__field.labels.node}" in of_series["Node ${__field.labels.node}"]
    assert "var-rank=${__value.raw}" in overrides(table, "Rank")["links"][0]["url"]
    assert "/d/zerowatch-devices" in overrides(table, "Node")["links"][0]["url"]


def test_a_rank_is_chosen_on_the_same_dashboard_if_it_has_the_choice():
    by_rank = TimeSeries(**WORDS, queries=(Query('up{rank=~"$rank"}', "rank {{rank}}"),))

    (json,) = drawn(by_rank)

    assert "/d/zerowatch-a-b?" in json["fieldConfig"]["defaults"]["links"][0]["url"]


def test_panels_and_rows_that_ignore_the_choice_of_ranks_are_marked():
    chosen = Stat(**WORDS, queries=(Query('up{rank=~"$rank"}', "up"),))
    whole = Stat(**WORDS, queries=(QUERY,))

    json = page_of(Row("Mixed", (chosen, whole)), Row("Whole", (whole,)))["panels"]

    assert [panel["title"] for panel in json] == [
        *("Mixed", "Title", "Title (all ranks)"),
        *("Whole (all ranks)", "Title"),
    ]


def test_a_dashboard_without_the_choice_of_ranks_marks_nothing_and_has_no_such_variable():
    json = page_of(Row("Whole", (Stat(**WORDS, queries=(QUERY,)),)))

    assert [panel["title"] for panel in json["panels"]] == ["Whole", "Title"]
    names = [variable["name"] for variable in json["templating"]["list"]]
    assert names == ["datasource", "runbook", "job", "run"]


def test_an_alert_links_to_its_page_in_the_runbook_in_lower_case():
    (json,) = drawn(
        Table(
            **WORDS,
            labels={"runbook_page": "Runbook"},
            columns=(Column(title="Since", expression="up"),),
            after=("Runbook",),
            lower_case=("Runbook",),
        )
    )

    assert overrides(json, "Runbook")["links"][0]["url"] == "${runbook}#${__value.raw}"
    assert json["transformations"][2]["options"]["outputFormat"] == "Lower Case"
    assert json["transformations"][1]["options"]["indexByName"] == {"Value": 0, "runbook_page": 1}


def test_a_heatmap_of_series_has_a_row_for_each_and_few_points():
    panel = SeriesHeatmap(**WORDS, queries=(Query("up", "{{node}}"),), unit="percentunit")
    (json,) = drawn(panel)

    assert (json["type"], json["options"]["calculate"]) == ("heatmap", False)
    assert json["targets"][0]["format"] == "time_series"
    assert json["maxDataPoints"] == 120
    assert "filterValues" not in json["options"], "0 is a value and not an empty bucket"


def test_each_curve_of_an_xy_chart_joins_its_two_queries():
    curves = tuple(Curve(name=name, x="steps", y="loss", color="blue") for name in "AB")
    (json,) = drawn(XYChart(**WORDS, curves=curves, x_title="step"))

    assert [target["legendFormat"] for target in json["targets"]] == ["A step", "A", "B step", "B"]
    assert [change["filter"]["options"] for change in json["transformations"]] == [
        "/^(?:A|B)$/",
        "/^(?:C|D)$/",
    ]
    assert [one["frame"]["matcher"]["options"] for one in json["options"]["series"]] == [0, 0, 1, 1]
