"""A Prometheus with the shipped rules that holds a run's past, and scrapes its ranks on from there.

The past goes in by remote write, raw values first, then what the recording rules make of them, ten
minutes at a time; so the head block holds the hour as if Prometheus had scraped it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import yaml
from bench.scale.rank_contents import INTERVAL_SECONDS
from bench.scale.remote_write import RemoteWriter, encode_labels, encode_samples
from fakes.scraper import eventually
from servers.prometheus_server import Prometheus

from zerowatch.metrics.settings import Detail

RULES = Path(__file__).parents[3] / "dashboards" / "rendered" / "prometheus"
KINDS = 32
TICKS_AT_ONCE = 40
GLOBAL = f"global: {{scrape_interval: {INTERVAL_SECONDS}s}}\n"
RUN = """
rule_files: ["{rules}/*.yaml"]
scrape_configs:
  - job_name: zerowatch
    honor_labels: true
    http_sd_configs: [{{url: "http://{address}/targets", refresh_interval: 5s}}]
"""
FLAGS = (
    "--web.enable-remote-write-receiver",
    "--storage.tsdb.retention.time=3h",
    "--query.timeout=60s",
)


class Store:
    """The Prometheus and its ranks.

    Args:
        folder: Where Prometheus works.
        ranks: Ranks of the run.
        past_seconds: How much of the past to write.
        detail: What the ranks serve.
    """

    def __init__(self, folder: Path, ranks: int, past_seconds: int, detail: Detail) -> None:
        first = int(time.time() - past_seconds) // INTERVAL_SECONDS
        script = str(Path(__file__).with_name("played_ranks.py"))
        self._ranks = subprocess.Popen(
            [sys.executable, script, str(ranks), str(KINDS), str(first), detail],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        ranks_address = self._line()
        self.prometheus = Prometheus(folder, GLOBAL, *FLAGS)
        self.filled_samples, began = 0, time.monotonic()
        if not eventually(self.prometheus.is_ready, seconds=30, pause=0.2):
            raise RuntimeError(f"Prometheus does not start: {self.prometheus.log.read_text()}")
        self._fill(first)
        self.fill_seconds = time.monotonic() - began
        config = GLOBAL + RUN.format(address=ranks_address, rules=RULES)
        (folder / "prometheus.yml").write_text(config)
        self._send("")
        self.prometheus.process.send_signal(signal.SIGHUP)

    def metric(self, name: str) -> float:
        """Return a metric of Prometheus itself, summed over its labels."""
        with urllib.request.urlopen(f"http://{self.prometheus.address}/metrics") as response:
            lines = response.read().decode().splitlines()
        ours = (line for line in lines if line.startswith((f"{name} ", f"{name}{{")))
        return sum(float(line.rpartition(" ")[2]) for line in ours)

    def close(self) -> None:
        self.prometheus.close()
        self._ranks.kill()
        self._ranks.wait()

    def _fill(self, tick: int) -> None:
        """Write the past by remote write, from a tick up to now."""
        while tick < (now := int(time.time()) // INTERVAL_SECONDS):
            last = min(tick + TICKS_AT_ONCE, now + 1) - 1
            self._send(f"{self.prometheus.address} {last}")
            self.filled_samples += int(self._line())
            for expression, labels in _recording_rules():
                self._record(expression, labels, tick, last)
            tick = last + 1

    def _record(self, expression: str, labels: dict[str, str], first: int, last: int) -> None:
        answer = self.prometheus.ask(
            "query_range",
            query=expression,
            start=first * INTERVAL_SECONDS,
            end=last * INTERVAL_SECONDS,
            step=INTERVAL_SECONDS,
        )
        if not answer["result"]:
            return
        writer = RemoteWriter(self.prometheus.address)
        writer.write(
            (
                encode_labels(series["metric"] | labels),
                encode_samples(
                    [float(value) for _, value in series["values"]],
                    [round(1000 * moment) for moment, _ in series["values"]],
                ),
            )
            for series in answer["result"]
        )
        writer.close()

    def _send(self, line: str) -> None:
        assert self._ranks.stdin is not None
        self._ranks.stdin.write(line + "\n")
        self._ranks.stdin.flush()

    def _line(self) -> str:
        assert self._ranks.stdout is not None
        return self._ranks.stdout.readline().strip()


def _recording_rules() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield expression and labels of what Prometheus would have recorded, in order."""
    for group in yaml.safe_load((RULES / "recording.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["expr"], {"__name__": rule["record"], **rule.get("labels", {})}
