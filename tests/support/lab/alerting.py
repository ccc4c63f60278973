"""A real Prometheus and Alertmanager with the shipped rules, and the history of each alert.

with alerting(folder, Timing(scale=1 / 30), [targets_url]) as monitoring:
    monitoring.alerts.poll()
"""

from __future__ import annotations

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

from fakes.scraper import eventually
from require import program
from servers.free_port import free_port
from servers.prometheus_server import Prometheus

from zerowatch.dashboards.prometheus_files import rule_files
from zerowatch.dashboards.timing import Timing

STARTING_SECONDS = 30.0
LOOK_SECONDS = 0.5
GRAFANA, RUNBOOK = "http://grafana.example.org", "http://runbook.example.org/page"
CONFIG = """
global:
  scrape_interval: 1s
  scrape_timeout: 1s
  evaluation_interval: 1s
  external_labels: {{zerowatch_grafana: "{grafana}", zerowatch_runbook: "{runbook}"}}
rule_files: [prometheus/*.yaml]
alerting: {{alertmanagers: [{{static_configs: [{{targets: ["{alertmanager}"]}}]}}]}}
scrape_configs:
  - job_name: zerowatch
    honor_labels: true
{discovery}
"""


@dataclass
class Spell:
    """One alert in Alertmanager, from its first to its last observation.

    Attributes:
        seen: By the monotonic clock; `gone` too, None while it lasts.
        silenced: Whether another alert silenced it, at any time.
    """

    labels: dict[str, str]
    annotations: dict[str, str]
    seen: float
    gone: float | None = None
    silenced: bool = False


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
            self._lasting[name].silenced |= bool(alert["status"]["inhibitedBy"])

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

    def sent(self, status: str, alert: str) -> list[str]:
        """Return the lines that the receiver wrote of an alert, "FIRING" or "RESOLVED"."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if {status, alert} <= set(line.split(" | ")[0].split())]


@contextmanager
def alerting(folder: Path, timing: Timing, targets: Sequence[str | Path]) -> Iterator[Monitoring]:
    """Start the servers on free ports of loopback, and end them.

    Args:
        folder: An empty folder for their files.
        timing: The rules' windows.
        targets: Target lists of runs: addresses, which need not answer yet, or files.
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
    config = CONFIG.format(
        alertmanager=address, discovery=_discovery(targets), grafana=GRAFANA, runbook=RUNBOOK
    )
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


def _discovery(targets: Sequence[str | Path]) -> str:
    addresses = [target for target in targets if isinstance(target, str)]
    files = [str(target) for target in targets if isinstance(target, Path)]
    http = [{"url": address, "refresh_interval": "2s"} for address in addresses]
    listed = [{"files": files, "refresh_interval": "1s"}] if files else []
    return f"    http_sd_configs: {json.dumps(http)}\n    file_sd_configs: {json.dumps(listed)}"


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
