"""The receivers and the template of the page on notifications are valid, and fit our routes."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from package_tree import ROOT
from require import program

from zerowatch.dashboards.prometheus_files import rule_files

PAGE = (ROOT / "docs" / "guides" / "notifications.md").read_text()
RECEIVERS, _LINKS = re.findall(r"```yaml\n(.+?)```", PAGE, re.DOTALL)
(TEMPLATE,) = re.findall(r"```text\n(.+?)```", PAGE, re.DOTALL)
FOLDER = "/etc/alertmanager/templates"


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    (tmp_path / "zerowatch.tmpl").write_text(TEMPLATE)
    return tmp_path


def amtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [program("amtool", apt="prometheus-alertmanager"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_amtool_accepts_our_routes_with_the_receivers_of_the_page(templates: Path) -> None:
    ours = yaml.safe_load(rule_files()["alertmanager/alertmanager.yml"])
    theirs = yaml.safe_load(RECEIVERS.replace(FOLDER, str(templates)))
    file = templates / "alertmanager.yml"
    file.write_text(yaml.safe_dump({**ours, **theirs}))

    done = amtool("check-config", str(file))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 receivers" in done.stdout
    assert "1 templates" in done.stdout


def test_no_secret_is_in_the_configuration() -> None:
    options = set(re.findall(r"(\w*(?:key|password|api_url)\w*):", RECEIVERS))

    assert options == {"routing_key_file", "api_url_file", "auth_password_file"}


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        (
            {"runbook_url": "http://wiki#a", "dashboard_url": "http://grafana/d/b"},
            "Runbook: http://wiki#a\nDashboard: http://grafana/d/b\n",
        ),
        ({"runbook_url": "", "dashboard_url": ""}, ""),
    ],
)
def test_the_text_names_the_host_and_only_links_that_are_set(
    annotations: dict[str, str], expected: str, templates: Path
) -> None:
    texts = {"summary": "Rank 3 does not answer", "description": "Look at it."}
    alert = {
        "status": "firing",
        "labels": {"alertname": "ZerowatchRankHung", "run": "night-7", "node": "node-12"},
        "annotations": {**texts, **annotations},
        "startsAt": "2026-11-23T03:00:00Z",
        "endsAt": "0001-01-01T00:00:00Z",
    }
    data = {
        "status": "firing",
        "receiver": "warning",
        "groupLabels": {"alertname": "ZerowatchRankHung", "run": "night-7"},
        "alerts": [alert],
    }
    (templates / "data.json").write_text(json.dumps(data))
    options = [
        f"--template.glob={templates}/*.tmpl",
        '--template.text={{ template "zerowatch.title" . }}\n{{ template "zerowatch.text" . }}',
        f"--template.data={templates / 'data.json'}",
    ]

    done = amtool("template", "render", *options)

    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.strip()
        == (
            "[FIRING] ZerowatchRankHung in run night-7\n"
            "Rank 3 does not answer (host node-12)\nLook at it.\n" + expected
        ).strip()
    )
