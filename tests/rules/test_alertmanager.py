"""Tests of the configuration in a real Alertmanager: routing by severity, and inhibition."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from fakes.scraper import eventually
from require import program
from rules.promtool import written
from servers.free_port import free_port

from zerowatch.dashboards.alerts import alerts
from zerowatch.dashboards.prometheus_files import rule_files
from zerowatch.dashboards.timing import Timing

FILE = "alertmanager/alertmanager.yml"
PACKAGE = "prometheus-alertmanager"
KNOWN = {alert.name: alert for alert in alerts(Timing())}
IN_RUN = {"job": "zerowatch", "run": "night-7"}


def amtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [program("amtool", apt=PACKAGE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_amtool_accepts_the_configuration(rules):
    ended = amtool("check-config", rules / FILE)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 receivers" in ended.stdout


def test_amtool_rejects_a_configuration_without_a_receiver(tmp_path):
    files = rule_files()
    wrong = files[FILE].replace("- name: info", "- name: inform")

    ended = amtool("check-config", written({FILE: wrong}, tmp_path) / FILE)

    assert ended.returncode != 0
    assert 'undefined receiver "info" used in route' in ended.stdout + ended.stderr


@pytest.mark.parametrize("alert", KNOWN.values(), ids=KNOWN)
def test_an_alert_goes_to_the_receiver_of_its_severity(alert, rules):
    receiver = {"none": "watchdog"}.get(alert.severity, alert.severity)
    labels = {"alertname": alert.name, **IN_RUN, **alert.labels}
    matchers = [f"{name}={value}" for name, value in labels.items()]

    ended = amtool("config", "routes", "test", f"--config.file={rules / FILE}", *matchers)

    assert ended.stdout.strip() == receiver


def test_an_alert_of_another_severity_goes_to_the_default_receiver(rules):
    config = f"--config.file={rules / FILE}"

    ended = amtool("config", "routes", "test", config, "alertname=Other", "severity=page")

    assert ended.stdout.strip() == "warning"


def test_the_address_of_the_webhook_is_configurable():
    text = rule_files(webhook_url="http://127.0.0.1:1/hook")[FILE]

    assert text.count("url: http://127.0.0.1:1/hook") == 3
    assert rule_files()[FILE].count("url: http://alert-log:9099/") == 3


class Alertmanager:
    """An Alertmanager process on loopback, whose webhook need not exist."""

    def __init__(self, folder: Path) -> None:
        files = rule_files(Timing(scale=1 / 30), webhook_url="http://127.0.0.1:1/")
        self._address = f"127.0.0.1:{free_port()}"
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                program("prometheus-alertmanager", apt=PACKAGE),
                f"--config.file={written(files, folder) / FILE}",
                f"--storage.path={folder / 'data'}",
                f"--web.listen-address={self._address}",
                "--cluster.listen-address=",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=60):
                return True
        except OSError:
            return False

    def raise_(self, *raised: dict[str, str]) -> None:
        body = json.dumps([{"labels": labels} for labels in raised]).encode()
        request = urllib.request.Request(
            f"http://{self._address}/api/v2/alerts",
            data=body,
            headers={"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=60).close()

    def alerts(self, run: str) -> dict[str, str]:
        """Return whether each alert of a run is active or suppressed, by name and rank."""
        url = f"http://{self._address}/api/v2/alerts?filter=run%3D%22{run}%22"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return {
                alert["labels"]["alertname"].removeprefix("Zerowatch")
                + alert["labels"].get("rank", ""): alert["status"]["state"]
                for alert in json.load(answer)
            }

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        self._log.close()


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alertmanager]:
    with contextlib.closing(Alertmanager(tmp_path_factory.mktemp("alertmanager"))) as server:
        assert eventually(server.is_ready, pause=0.1)
        yield server


def labels(name: str, run: str, **own: str) -> dict[str, str]:
    alert = KNOWN["Zerowatch" + name]
    return {"alertname": alert.name, "job": "zerowatch", "run": run, **alert.labels, **own}


ACTIVE, SUPPRESSED = "active", "suppressed"


@pytest.mark.parametrize(
    ("run", "raised", "expected"),
    [
        pytest.param(
            "a",
            [
                ("RankVanished", {"rank": "1"}),
                ("RankVanished", {"rank": "2"}),
                ("TrainingStalled", {}),
                ("OomRiskCritical", {"rank": "1", "device": "cpu"}),
                ("CollectiveMismatch", {}),
                ("LossNotFinite", {}),
                ("HostMemoryRisk", {"rank": "1", "device": "cpu"}),
                ("CommBottleneck", {}),
                ("WatchOverhead", {}),
            ],
            {
                "RankVanished1": ACTIVE,
                "RankVanished2": ACTIVE,
                "TrainingStalled": SUPPRESSED,
                "OomRiskCritical1": ACTIVE,
                "CollectiveMismatch": ACTIVE,
                "LossNotFinite": ACTIVE,
                "HostMemoryRisk1": ACTIVE,
                "CommBottleneck": SUPPRESSED,
                "WatchOverhead": SUPPRESSED,
            },
            id="a rank that vanished silences warnings, and not what explains it",
        ),
        pytest.param(
            "g",
            [
                ("RunDied", {}),
                ("TrainingStalled", {}),
                ("CommBottleneck", {}),
                ("HostMemoryNodeFull", {"node": "a"}),
            ],
            {
                "RunDied": ACTIVE,
                "TrainingStalled": SUPPRESSED,
                "CommBottleneck": SUPPRESSED,
                "HostMemoryNodeFull": ACTIVE,
            },
            id="and so does a run that died",
        ),
        pytest.param(
            "b",
            [("CommBottleneck", {}), ("LinkSlow", {"group": "dp", "node": "a"})],
            {"CommBottleneck": ACTIVE, "LinkSlow": ACTIVE},
            id="and not an alert of another run",
        ),
        pytest.param(
            "c",
            [
                ("OomRiskCritical", {"rank": "1", "device": "cuda:0"}),
                ("OomRiskHigh", {"rank": "1", "device": "cuda:0"}),
                ("OomRiskHigh", {"rank": "2", "device": "cuda:0"}),
            ],
            {"OomRiskCritical1": ACTIVE, "OomRiskHigh1": SUPPRESSED, "OomRiskHigh2": ACTIVE},
            id="a critical risk silences the high one of the same rank",
        ),
        pytest.param(
            "d",
            [
                ("TrainingStalled", {}),
                ("LowDeviceUtilization", {}),
                ("LinkSlow", {"group": "dp"}),
                ("StragglerRank", {"rank": "3"}),
                ("LossNotFinite", {}),
            ],
            {
                "TrainingStalled": ACTIVE,
                "LowDeviceUtilization": SUPPRESSED,
                "LinkSlow": SUPPRESSED,
                "StragglerRank3": SUPPRESSED,
                "LossNotFinite": ACTIVE,
            },
            id="a standstill silences what it causes",
        ),
        pytest.param(
            "e",
            [("DataBound", {"phase": "data"}), ("LowDeviceUtilization", {})],
            {"DataBound": ACTIVE, "LowDeviceUtilization": SUPPRESSED},
            id="GPUs that wait for data are no news",
        ),
        pytest.param(
            "f",
            [("CommBottleneck", {}), ("LowDeviceUtilization", {})],
            {"CommBottleneck": ACTIVE, "LowDeviceUtilization": ACTIVE},
            id="but GPUs that wait for communication count as busy",
        ),
    ],
)
def test_an_alert_inhibits_exactly_its_consequences(run, raised, expected, alertmanager):
    alertmanager.raise_(*(labels(name, run, **own) for name, own in raised))

    # An alert counts as active until it was looked at for the first time.
    eventually(lambda: alertmanager.alerts(run) == expected, pause=0.2)
    assert alertmanager.alerts(run) == expected


def test_messages_wait_and_repeat_by_severity():
    content = yaml.safe_load(rule_files()[FILE])
    durations = ("group_wait", "group_interval", "repeat_interval")
    routes = [
        (route["matchers"], route["receiver"], *(route[name] for name in durations))
        for route in content["route"]["routes"]
    ]

    assert routes == [
        (['severity="critical"'], "critical", "20s", "1m", "1h"),
        (['severity="warning"'], "warning", "30s", "5m", "4h"),
        (['severity="info"'], "info", "5m", "5m", "1d"),
        (['severity="none"'], "watchdog", "0d", "1m", "5m"),
    ]
    assert [content["route"][name] for name in ("receiver", *durations)] == [
        *("warning", "30s", "5m", "4h"),
    ]
    assert content["route"]["group_by"] == ["job", "run", "alertname"]


def test_resolved_alerts_are_sent_too_and_the_watchdog_only_where_a_service_is_connected():
    content = yaml.safe_load(rule_files(webhook_url="http://there/")[FILE])

    webhook = [{"url": "http://there/", "send_resolved": True}]
    assert content["receivers"] == [
        {"name": "critical", "webhook_configs": webhook},
        {"name": "warning", "webhook_configs": webhook},
        {"name": "info", "webhook_configs": webhook},
        {"name": "watchdog"},
    ]
