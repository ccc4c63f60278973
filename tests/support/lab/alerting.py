"""A real Prometheus and Alertmanager with the shipped rules, and the history of each alert.

with alerting(folder, Timing(scale=1 / 15), targets) as monitoring:
    monitoring.alerts.poll()
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from fakes.scraper import eventually
from require import program
from servers.free_port import free_port
from servers.prometheus_server import Prometheus

from zerowatch.dashboards.prometheus_files import rule_files
from zerowatch.dashboards.stack.prometheus_config import prometheus_configuration
from zerowatch.dashboards.timing import Timing

STARTING_SECONDS = 30.0
LOOK_SECONDS = 0.5
GRAFANA, RUNBOOK = "http://grafana.example.org", "http://runbook.example.org/page"
# Between two scrapes, and between two evaluations: 15 s at the scale 1/15.
INTERVAL = "1s"


@dataclass
class Spell:
    """One alert in Alertmanager, from its first to its last observation.

    Attributes:
        seen: By the monotonic clock; `gone` too, None while it lasts.
        was_heard: Whether no other alert inhibited it, at any time.
    """

    labels: dict[str, str]
    annotations: dict[str, str]
    seen: float
    gone: float | None = None
    was_heard: bool = False


@dataclass
class AlertHistory:
    """Alerts seen in Alertmanager, at the moments at which it was polled."""

    address: str
    spells: list[Spell] = field(default_factory=list)
    _lasting: dict[str, Spell] = field(default_factory=dict)

    def poll(self) -> None:
        """Record new alerts, and alerts that have ended."""
        now, held = time.monotonic(), {each["fingerprint"]: each for each in self._ask()}
        for name in self._lasting.keys() - held.keys():
            self._lasting.pop(name).gone = now
        for name, alert in held.items():
            if name not in self._lasting:
                spell = Spell(alert["labels"], alert["annotations"], seen=now)
                self._lasting[name] = spell
                self.spells.append(spell)
            self._lasting[name].annotations = alert["annotations"]
            self._lasting[name].was_heard |= not alert["status"]["inhibitedBy"]

    def find(self, alert: str, *, since: float, **labels: str) -> Spell | None:
        """Return the first spell of an alert that began since then; None if there is none."""
        wanted = {"alertname": alert, **labels}
        return next(
            (
                spell
                for spell in self.spells
                if spell.seen >= since and wanted.items() <= spell.labels.items()
            ),
            None,
        )

    def lasts(self, alert: str, **labels: str) -> bool:
        """Whether Alertmanager currently has an alert."""
        wanted = {"alertname": alert, **labels}
        return any(wanted.items() <= spell.labels.items() for spell in self._lasting.values())

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Poll until the condition is true; return False after the timeout."""

        def look_once() -> bool:
            self.poll()
            return condition()

        return eventually(look_once, seconds, pause=LOOK_SECONDS)

    def _ask(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"http://{self.address}/api/v2/alerts", timeout=10) as answer:
            return list(json.load(answer))


@dataclass(frozen=True)
class Monitoring:
    """The servers: Prometheus, Alertmanager's alerts, and the log of what was sent on."""

    prometheus: Prometheus
    alerts: AlertHistory
    log: Path

    def sent(self, run: str) -> list[str]:
        """Return the lines that the receiver wrote about a run."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if f"run={run}" in line.split(" | ")[0].split()]


@contextmanager
def alerting(folder: Path, timing: Timing, targets: Path) -> Iterator[Monitoring]:
    """Start the servers on free ports of loopback, and end them.

    Args:
        folder: An empty folder for their files.
        timing: The rules' windows.
        targets: The file with the targets of all runs, in the format of file_sd.
    """
    binary = program("prometheus-alertmanager", apt="prometheus-alertmanager")
    log_port, address = free_port(), f"127.0.0.1:{free_port()}"
    for name, text in rule_files(timing, webhook_url=f"http://127.0.0.1:{log_port}/").items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    log = folder / "alerts.log"
    receiver = (sys.executable, "-m", "zerowatch.dashboards.stack.alert_log", "--port", log_port)
    server = (
        binary,
        f"--config.file={folder / 'alertmanager/alertmanager.yml'}",
        f"--storage.path={folder / 'alertmanager/data'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
    )
    config = yaml.safe_dump(_configuration(folder, targets, address))
    with (
        _process(receiver, log),
        _process(server, folder / "alertmanager.log"),
        closing(Prometheus(folder, config)) as prometheus,
    ):
        history = AlertHistory(address)
        if not eventually(lambda: _answers(history) and prometheus.is_ready(), STARTING_SECONDS):
            logs = [each.read_text() for each in folder.glob("*.log")]
            raise RuntimeError("\n".join(["no server answers:", *logs]))
        yield Monitoring(prometheus=prometheus, alerts=history, log=log)


def _configuration(folder: Path, targets: Path, alertmanager: str) -> dict[str, Any]:
    """Return the shipped configuration with shorter intervals, and without Prometheus' own jobs."""
    config = prometheus_configuration(
        rules=folder / "prometheus",
        targets=targets,
        prometheus="",
        alertmanager=alertmanager,
        runbook=RUNBOOK,
    )
    config["global"]["external_labels"]["zerowatch_grafana"] = GRAFANA
    config["global"] |= {
        "scrape_interval": INTERVAL,
        "scrape_timeout": INTERVAL,
        "evaluation_interval": INTERVAL,
    }
    ranks = copy.deepcopy(config["scrape_configs"][0])
    ranks["file_sd_configs"][0]["refresh_interval"] = INTERVAL
    for rule in ranks["relabel_configs"]:
        if rule.get("target_label") in ("__scrape_interval__", "__scrape_timeout__"):
            rule["replacement"] = INTERVAL
    return {**config, "scrape_configs": [ranks]}


def _answers(history: AlertHistory) -> bool:
    with suppress(OSError):
        history.poll()
        return True
    return False


@contextmanager
def _process(command: Sequence[object], log: Path) -> Iterator[None]:
    with ExitStack() as undo:
        output = undo.enter_context(log.open("w"))
        process = subprocess.Popen(
            [str(part) for part in command], stdout=output, stderr=subprocess.STDOUT
        )
        undo.callback(process.wait)
        undo.callback(process.terminate)
        yield
