"""The dashboards match the types that Grafana 11, 12 and 13 publish, checked by TypeScript."""

from __future__ import annotations

import copy

import pytest
from dashboard_checks.grafana_types import CACHE, RELEASES, complaints, installed
from dashboard_checks.lint import panels

from zerowatch.dashboards.definitions import DASHBOARDS
from zerowatch.dashboards.grafana.dashboard_json import dashboard_json

JSON = {dashboard.name: dashboard_json(dashboard) for dashboard in DASHBOARDS}


@pytest.fixture(scope="module", autouse=True)
def types():
    return installed()


def first(dashboard, kind):
    return next(panel for panel in panels(dashboard) if panel["type"] == kind)


def misspell(holder, key):
    holder[key + "x"] = holder.pop(key)


@pytest.mark.parametrize("release", RELEASES)
def test_all_dashboards_match_the_types_of_a_grafana_release(release):
    assert complaints(JSON, release, CACHE / f"dashboards-{release}") == ""


FAULTS = {
    "a misspelled key of the dashboard": lambda page: misspell(page, "graphTooltip"),
    "a text as schema version": lambda page: page.update(schemaVersion="39"),
    "a misspelled key of a panel": lambda page: misspell(first(page, "stat"), "fieldConfig"),
    "a misspelled key of a grid position": lambda page: misspell(
        first(page, "stat")["gridPos"], "w"
    ),
    "an unknown calculation's place": lambda page: first(page, "bargauge")["options"].update(
        calcs=["mean"]
    ),
    "an unknown display mode": lambda page: first(page, "bargauge")["options"].update(
        displayMode="gradientx"
    ),
    "an unknown legend placement": lambda page: first(page, "timeseries")["options"][
        "legend"
    ].update(placement="left"),
    "an unknown line style of thresholds": lambda page: first(page, "timeseries")["fieldConfig"][
        "defaults"
    ]["custom"].update(thresholdsStyle={"mode": "dotted"}),
    "a text as a threshold": lambda page: first(page, "stat")["fieldConfig"]["defaults"][
        "thresholds"
    ]["steps"][0].update(value="null"),
    "an unknown format of a query": lambda page: first(page, "table")["targets"][0].update(
        format="tables"
    ),
    "a stale key of a query": lambda page: first(page, "stat")["targets"][0].update(metric=""),
    "an unknown kind of variable": lambda page: page["templating"]["list"][2].update(
        type="queries"
    ),
    "a misspelled key of an annotation": lambda page: misspell(
        page["annotations"]["list"][1], "iconColor"
    ),
    "an unknown kind of link": lambda page: page["links"][0].update(type="dashboard"),
}


def test_the_type_check_reports_each_seeded_fault():
    wrong = {}
    for index, seed in enumerate(FAULTS.values()):
        wrong[f"fault{index}"] = copy.deepcopy(JSON["communication"])
        seed(wrong[f"fault{index}"])

    said = complaints(wrong, "13", CACHE / "faults")

    unnoticed = [fault for index, fault in enumerate(FAULTS) if f"fault{index}.ts(" not in said]
    assert unnoticed == []
