"""Tests of the build: the committed files are up to date, and differing files are reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from package_tree import ROOT

from zerowatch.dashboards.build import build, rendered_files, stale

RENDERED = ROOT / "dashboards" / "rendered"
DASHBOARD = "grafana/zerowatch-overview.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build(tmp_path)
    return tmp_path


def test_the_committed_files_are_up_to_date():
    assert stale(RENDERED) == []


def test_files_just_built_are_up_to_date(folder):
    assert stale(folder) == []


def test_two_builds_produce_the_same_files():
    assert rendered_files() == rendered_files()


def test_dashboards_link_to_the_runbook_of_the_stack(folder):
    variables = json.loads((folder / DASHBOARD).read_text())["templating"]["list"]

    (runbook,) = [each for each in variables if each["name"] == "runbook"]
    assert runbook["query"] == "http://127.0.0.1:9099/runbook"  # as in compose.yaml


def test_a_file_edited_by_hand_is_reported_with_what_to_do(folder):
    (folder / DASHBOARD).write_text((folder / DASHBOARD).read_text().replace("Loss", "Los"))

    (message,) = stale(folder)

    assert str(folder / DASHBOARD) in message
    assert "change dashboards/" in message
    assert "zerowatch dashboards build" in message


def test_a_missing_file_is_reported(folder):
    (folder / DASHBOARD).unlink()

    (message,) = stale(folder)

    assert message.startswith(f"{folder / DASHBOARD}: missing.")


def test_a_file_no_longer_generated_is_reported_and_removed_by_a_build(folder):
    left_over = folder / "grafana" / "zerowatch-old.json"
    left_over.write_text("{}")

    (message,) = stale(folder)
    build(folder)

    assert str(left_over) in message
    assert not left_over.exists()


def test_files_of_other_origin_are_kept(folder):
    theirs = (folder / "grafana" / "grafana.db", folder / "prometheus" / "mine.yaml")
    for file in theirs:
        file.write_text("theirs")

    build(folder)

    assert [file.read_text() for file in theirs] == ["theirs", "theirs"]
    assert len(stale(folder)) == len(theirs)


def test_dashboards_are_written_indented_and_sorted(folder):
    text = (folder / DASHBOARD).read_text()

    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
