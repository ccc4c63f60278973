"""Every board has the types that Grafana 11, 12 and 13 publish; and wrong ones would be noticed."""

from __future__ import annotations

import copy

import pytest
from board_checks.grafana_types import CACHE, RELEASES, complaints, installed

from zerowatch.dashboards.boards import BOARDS
from zerowatch.dashboards.grafana.dashboard import dashboard_json

JSON = {board.name: dashboard_json(board) for board in BOARDS}


@pytest.fixture(scope="module", autouse=True)
def types():
    return installed()


def first(board, kind):
    return next(panel for panel in board["panels"] if panel["type"] == kind)


def misspell(holder, key):
    holder[key + "x"] = holder.pop(key)


@pytest.mark.parametrize("release", RELEASES)
def test_all_boards_have_the_types_of(release):
    assert complaints(JSON, release, CACHE / f"boards-{release}") == ""


FAULTS = {
    "a misspelt key of the board": lambda board: misspell(board, "graphTooltip"),
    "a text as schema version": lambda board: board.update(schemaVersion="39"),
    "a misspelt key of a panel": lambda board: misspell(first(board, "stat"), "fieldConfig"),
    "a misspelt key of a grid position": lambda board: misspell(
        first(board, "stat")["gridPos"], "w"
    ),
    "an unknown calculation's place": lambda board: first(board, "bargauge")["options"].update(
        calcs=["mean"]
    ),
    "an unknown display mode": lambda board: first(board, "bargauge")["options"].update(
        displayMode="gradientx"
    ),
    "an unknown legend placement": lambda board: first(board, "timeseries")["options"][
        "legend"
    ].update(placement="left"),
    "an unknown line style of thresholds": lambda board: first(board, "timeseries")["fieldConfig"][
        "defaults"
    ]["custom"].update(thresholdsStyle={"mode": "dotted"}),
    "a text as a threshold": lambda board: first(board, "stat")["fieldConfig"]["defaults"][
        "thresholds"
    ]["steps"][0].update(value="null"),
    "an unknown format of a query": lambda board: first(board, "table")["targets"][0].update(
        format="tables"
    ),
    "a stale key of a query": lambda board: first(board, "stat")["targets"][0].update(metric=""),
    "an unknown kind of variable": lambda board: board["templating"]["list"][1].update(
        type="queries"
    ),
    "a misspelt key of an annotation": lambda board: misspell(
        board["annotations"]["list"][1], "iconColor"
    ),
    "an unknown kind of link": lambda board: board["links"][0].update(type="dashboard"),
}


def test_each_seeded_fault_is_caught():
    wrong = {}
    for index, seed in enumerate(FAULTS.values()):
        wrong[f"fault{index}"] = copy.deepcopy(JSON["overview"])
        seed(wrong[f"fault{index}"])

    said = complaints(wrong, "13", CACHE / "faults")

    unnoticed = [fault for index, fault in enumerate(FAULTS) if f"fault{index}.ts(" not in said]
    assert unnoticed == []
