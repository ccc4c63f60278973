"""The dashboards pass the lint, and the lint reports each fault put into a dashboard."""

from __future__ import annotations

import copy
import json
from urllib.parse import parse_qs, urlsplit

import pytest
from dashboard_checks.lint import expressions, faults, panels

from zerowatch.dashboards.definitions import DASHBOARDS
from zerowatch.dashboards.grafana.dashboard_json import dashboard_json

BY_NAME = {dashboard.name: dashboard_json(dashboard) for dashboard in DASHBOARDS}
OVERVIEW = BY_NAME["overview"]
RUN = 'job="$job", run="$run"'


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda page: page.name)
def test_a_dashboard_has_no_lint_faults(dashboard):
    assert faults(dashboard_json(dashboard)) == []


def test_dashboards_have_unique_uids_that_equal_their_file_names():
    assert [dashboard.uid for dashboard in DASHBOARDS] == [
        "zerowatch-runs",
        "zerowatch-overview",
        "zerowatch-step-anatomy",
        "zerowatch-communication",
        "zerowatch-memory",
        "zerowatch-devices",
        "zerowatch-tuner",
        "zerowatch-overhead",
        "zerowatch-compare",
    ]


def test_the_overview_links_to_the_traces_of_the_run():
    (link,) = [link for link in OVERVIEW["links"] if link["type"] == "link"]

    panes = json.loads(parse_qs(urlsplit(link["url"]).query)["panes"][0])

    assert panes["zerowatch"]["datasource"] == "tempo"
    assert "$run" in panes["zerowatch"]["queries"][0]["query"]
    assert "$run%" in link["url"], "Grafana finds its variables before it decodes the address"


def test_only_the_step_time_panel_shows_exemplars():
    with_exemplars = {
        panel["title"]
        for dashboard in DASHBOARDS
        for panel in panels(dashboard_json(dashboard))
        for target in panel.get("targets", [])
        if target.get("exemplar")
    }

    assert with_exemplars == {"Step time"}


def first(dashboard, kind):
    return next(panel for panel in panels(dashboard) if panel["type"] == kind)


def ask(expression, **more):
    """Return a function that puts a query into a dashboard."""

    def seed(dashboard):
        first(dashboard, "timeseries")["targets"][0].update(expr=expression, **more)

    return seed


FAULTS = {
    "is no PromQL": ask("sum by (job"),
    "nobody writes": ask(f"zerowatch_losses{{{RUN}}}"),
    "nobody writes run:": ask(f"run:zerowatch_loss:median{{{RUN}}}"),
    "has no label phase": ask(f'zerowatch_loss{{{RUN}, rank="0", phase="data"}}'),
    "aggregates by op": ask(f'sum by (op) (zerowatch_loss{{{RUN}, rank="0"}})'),
    "the legend names op": ask(f"run:zerowatch_loss:avg{{{RUN}}}", legendFormat="{{op}}"),
    "lacks job": ask('run:zerowatch_loss:avg{job=~"$job", run="$run"}'),
    "lacks run": ask('run:zerowatch_loss:avg{job="$job"}'),
    'lacks run="run"': ask('run:zerowatch_loss:avg{job="$job", run=~"$run"}'),
    "lacks a choice of ranks": ask(f"zerowatch_loss{{{RUN}}}"),
    "only $__rate_interval": ask(f'rate(zerowatch_steps_total{{{RUN}, rank="0"}}[1m])'),
    "keeps its metric's name": lambda page: first(page, "table")["targets"][0].update(
        expr=f"topk(3, run_rank:zerowatch_step_duration_seconds:mean_rate5m{{{RUN}}})"
    ),
    "its data source is not": lambda page: first(page, "stat").update(
        datasource={"type": "prometheus", "uid": "prometheus"}
    ),
    "no title": lambda page: first(page, "stat").update(title=""),
    "no description that helps": lambda page: first(page, "stat").pop("description"),
    "no unit": lambda page: first(page, "stat")["fieldConfig"]["defaults"].pop("unit"),
    "no series is called": lambda page: first(page, "timeseries")["targets"][0].update(
        legendFormat="rank {{phase}}"
    ),
    "no query": lambda page: first(page, "stat").pop("targets"),
    "lies over": lambda page: first(page, "stat")["gridPos"].update(w=5),
    "leaves the grid": lambda page: first(page, "timeseries")["gridPos"].update(w=25),
    "panels share ids": lambda page: first(page, "timeseries").update(id=1),
    "no dashboard is": lambda page: first(page, "timeseries")["links"][0].update(
        url="/d/zerowatch-steps?${__all_variables}&${__url_time_range}"
    ),
    "its link loses": lambda page: first(page, "timeseries")["links"][0].update(
        url="/d/zerowatch-memory"
    ),
    "its links to dashboards lose": lambda page: page["links"][0].update(includeVars=False),
    "variables are": lambda page: page["templating"]["list"].pop(0),
    "no shared crosshair": lambda page: page.update(graphTooltip=0),
}


@pytest.mark.parametrize("words", FAULTS)
def test_the_lint_reports_each_seeded_fault(words):
    dashboard = copy.deepcopy(OVERVIEW)

    FAULTS[words](dashboard)

    assert any(words in fault for fault in faults(dashboard)), faults(dashboard)


def test_queries_by_rank_return_a_limited_number_of_series():
    """Each selector of the chosen ranks is aggregated or limited by topk or bottomk."""
    unbounded = [
        expression
        for dashboard in DASHBOARDS
        for expression in expressions(dashboard_json(dashboard))
        if 'rank=~"$rank"' in expression
        and not any(
            word in expression
            for word in ("topk", "bottomk", "by (job, run", "sum(", "max(", "avg(")
        )
    ]

    assert unbounded == []
