"""Tests of the reader of dashboards: it sends the queries that Grafana would send."""

from __future__ import annotations

from dataclasses import replace

import pytest
from promql_parts import operands, selectors
from servers.grafana_reader import DashboardQuery, Reader, dashboard_queries

DASHBOARD = {
    "uid": "b",
    "templating": {
        "list": [
            {"name": "run", "type": "query"},
            {"name": "rank", "type": "query", "includeAll": True, "allValue": ".*"},
        ]
    },
    "panels": [
        {
            "title": "Row",
            "panels": [
                {"title": "Inner", "targets": [{"refId": "A", "expr": "up", "instant": True}]}
            ],
        },
        {"title": "Words"},
        {
            "title": "Graph",
            "interval": "30s",
            "targets": [{"refId": "B", "expr": "up", "instant": False, "range": True}],
        },
    ],
    "annotations": {"list": [{"name": "Built in"}, {"name": "Starts", "expr": "up == 1"}]},
}


def query(expression: str, min_step: str = "") -> DashboardQuery:
    return DashboardQuery(
        dashboard="b",
        panel="p",
        ref="A",
        expression=expression,
        is_instant=False,
        min_step=min_step,
    )


def test_queries_in_rows_and_annotations_are_found():
    found = list(dashboard_queries(DASHBOARD))

    assert [(q.panel, q.ref, q.is_instant, q.min_step) for q in found] == [
        ("Inner", "A", True, ""),
        ("Graph", "B", False, "30s"),
        ("annotation Starts", "Anno", False, ""),
    ]


def test_variables_and_macros_are_replaced():
    reader = Reader(variables={"run": ["night-7"]}, range_seconds=3600, scrape_seconds=15)
    expression = 'rate(a{run=~"$run", rank=~"${rank}"}[$__rate_interval]) + b[$__range:$__interval]'

    filled = reader.fill_in(query(expression), DASHBOARD)

    assert filled == ('rate(a{run=~"night-7", rank=~".*"}[60000ms]) + b[3600000ms:15000ms]')


def test_only_the_format_regex_escapes_a_single_value():
    reader = Reader(variables={"run": ["lr0.1 (a/b)"]})

    filled = reader.fill_in(query("${run} ${run:regex} $run"), DASHBOARD)

    assert filled == r"lr0.1 (a/b) lr0\.1 \(a\/b\) lr0.1 (a/b)"


def test_an_annotation_has_a_hundred_points_and_a_short_rate_interval():
    *_, annotation = dashboard_queries(DASHBOARD)
    reader = Reader(range_seconds=6 * 3600.0)

    filled = reader.fill_in(replace(annotation, expression="$__interval $__rate_interval"), {})

    assert filled == "300000ms 60000ms"


def test_several_values_of_a_variable_become_one_pattern():
    reader = Reader(variables={"run": ["a", "b"]})

    assert reader.fill_in(query("$run"), DASHBOARD) == "(a|b)"


@pytest.mark.parametrize(
    ("hours", "min_step", "seconds"),
    [(1, "", 15), (1, "1m", 60), (6, "", 20), (24, "", 60), (24 * 7, "", 600)],
)
def test_the_step_is_the_time_of_a_pixel_but_at_least_a_scrape_interval(hours, min_step, seconds):
    reader = Reader(range_seconds=3600.0 * hours)

    assert reader.step_seconds(query("up", min_step)) == seconds


def test_the_metrics_of_an_expression_are_listed():
    expression = 'a{state!="b", run="c"} / on (run) sum by (run) (rate(d[5m]))'

    assert selectors(expression) == [
        ("a", frozenset({'state!="b"', 'run="c"'})),
        ("d", frozenset()),
    ]


def test_operands_returns_both_sides_of_each_comparison():
    expression = "(a > 0.5 or (b > 0.5 unless on (job) c)) and sum(d) / sum(e) < 1"

    assert operands(expression) == ["a", "b", "c", "sum(d) / sum(e)"]
