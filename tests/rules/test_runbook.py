"""Tests of the runbook: each alert has a complete page, whose queries are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rules.expressions import OF_SERVERS, selectors, unknown

import zerowatch.dashboards
from zerowatch.dashboards.alerts import alerts
from zerowatch.dashboards.timing import Timing
from zerowatch.metrics import thresholds
from zerowatch.metrics.settings import Settings
from zerowatch.metrics.xid_errors import XIDS

TEXT = (Path(zerowatch.dashboards.__file__).parent / "runbook.md").read_text()
SECTIONS = [
    "Meaning",
    "How to confirm",
    "Likely causes",
    "What to do",
    "What the tuner does by itself",
]
URGENCIES = {
    "critical": "**Critical: act within 5 minutes.**",
    "warning": "**Warning: act today.**",
    "info": "**Info: look at it on the next working day.**",
}
NAMES = [alert.name for alert in alerts(Timing())]
ALERTMANAGER = "--alertmanager.url=http://ALERTMANAGER:9093"


def pages(text: str) -> dict[str, str]:
    """Return the pages by the anchors that GitHub generates from their headings."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    titles = [title.lower().replace(" ", "-") for title in parts[::2]]
    return dict(zip(titles, parts[1::2], strict=True))


PAGES = pages(TEXT)
QUERIES = [
    pytest.param(query, id=f"{anchor} {number}")
    for anchor, page in PAGES.items()
    for number, query in enumerate(re.findall(r"```promql\n(.+?)```", page, flags=re.DOTALL), 1)
]


PERCENTAGES = {
    "zerowatchcommbottleneck": thresholds.EXPOSED_COMM_RATIO_HIGH,
    "zerowatchstragglerrank": thresholds.STRAGGLER_SCORE_HIGH,
    "zerowatchcommcoveragelow": thresholds.COMM_COVERAGE_LOW,
    "zerowatchdatabound": thresholds.DATA_RATIO_HIGH,
    "zerowatchlowdeviceutilization": thresholds.DEVICE_UTILIZATION_LOW,
    "zerowatchgputhrottled": thresholds.THROTTLED_RATIO_HIGH,
    "zerowatchhostmemorynodefull": thresholds.HOST_MEMORY_NODE_HIGH,
    "zerowatchlinkslow": thresholds.LINK_BANDWIDTH_LOW,
    "zerowatchmfudropped": thresholds.MFU_DROP_LOW,
    "zerowatchupdatesskipped": thresholds.SKIPPED_RATIO_HIGH,
    "zerowatchoomreplays": thresholds.REPLAY_RATIO_HIGH,
    "zerowatchwatchoverhead": thresholds.WATCH_RATIO_HIGH,
}


def test_there_is_one_page_for_each_alert():
    assert sorted(PAGES) == sorted(name.lower() for name in NAMES)


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_a_page_has_its_five_sections(page):
    parts = re.split(r"^### (.+)$", page, flags=re.MULTILINE)[1:]

    assert parts[::2] == SECTIONS
    assert all(body.strip() for body in parts[1::2])
    assert "```promql" in parts[3]
    assert parts[5].strip().startswith("1. ")


@pytest.mark.parametrize("alert", alerts(Timing()), ids=NAMES)
def test_a_page_begins_with_the_urgency_of_its_alert(alert):
    meaning = PAGES[alert.name.lower()].strip().removeprefix("### Meaning").strip()

    assert meaning.startswith(URGENCIES.get(alert.severity, ""))
    assert f"](#{alert.name.lower()})" in TEXT.partition("\n## ")[0]


@pytest.mark.parametrize(("anchor", "threshold"), PERCENTAGES.items(), ids=PERCENTAGES)
def test_the_first_percentage_of_a_page_is_the_threshold_of_the_alert(anchor, threshold):
    first = re.search(r"([\d.]+) %", PAGES[anchor])

    assert first and float(first[1]) == pytest.approx(100 * threshold)


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_uses_existing_metrics_and_labels(query):
    assert unknown(query) == []


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_is_about_one_run_or_about_a_server(query):
    of_servers = {"ALERTS", *OF_SERVERS}

    assert all(
        "run" in selector.labels or selector.name in of_servers for selector in selectors(query)
    )


def test_the_table_of_xids_is_that_of_the_alerts():
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+?) \|$", PAGES["zerowatchgpuxid"], re.M)

    assert [
        (int(number), meaning, cause, "drain" in action) for number, meaning, cause, action in rows
    ] == [(xid.number, xid.meaning, xid.cause, xid.drain) for xid in XIDS]


def test_commands_can_be_pasted():
    code = re.findall(r"```shell\n(.+?)```|`([^`\n]+)`", TEXT, flags=re.DOTALL)
    commands = [line for block, inline in code for line in (block or inline).splitlines()]
    amtool = [each for each in commands if re.match(r"amtool .*\b(silence|alert) add\b", each)]

    assert len(amtool) == 6
    assert all(each.startswith(f"amtool {ALERTMANAGER} ") for each in amtool)
    assert len(re.findall(r"amtool[^`]+?\badd\b", TEXT)) == len(amtool)
    assert "\\|" not in TEXT  # of a table's cell, which stays in code
    assert "-C python" not in TEXT  # which is not the name of a process of python3


def test_links_within_the_runbook_have_a_target():
    anchors = re.findall(r"\]\(#(.+?)\)", TEXT)

    assert set(anchors) == PAGES.keys()


def test_settings_named_in_the_runbook_exist():
    rooms = {name: field.annotation for name, field in Settings.model_fields.items()}
    named = set(re.findall(r"`([a-z]+)\.([a-z_]+)`", TEXT)) - {("metrics", "thresholds")}

    assert ("memory", "trace_leaks") in named
    assert [
        f"{room}.{option}" for room, option in named if option not in rooms[room].model_fields
    ] == []
