"""Tests of alerts from a real Prometheus: those of the run, with their state."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from fakes.scraper import eventually
from servers.prometheus_server import Prometheus

from zerowatch.runtime.top.http_client import Access, HttpClient
from zerowatch.runtime.top.prometheus_alerts import prometheus_alerts

pytestmark = pytest.mark.slow  # an alert fires after some evaluations

CONFIG = "global: {evaluation_interval: 1s}\nrule_files: [rules.yml]\n"
RULES = """
groups:
  - name: test
    rules:
      - alert: ZerowatchStragglerRank
        expr: label_replace(vector(0.21), "rank", "3", "", "")
        labels: {run: night-7, severity: warning}
        annotations: {summary: 'rank {{ $labels.rank }} is slow by {{ $value }}'}
      - alert: ZerowatchDataBound
        expr: vector(1)
        for: 1h
        labels: {run: night-7, severity: info}
      - alert: ZerowatchTrainingStalled
        expr: vector(1)
        labels: {run: another, severity: critical}
"""


def test_alerts_of_the_run_come_from_prometheus_with_firing_ones_first(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(RULES)
    get = HttpClient(Access()).get
    with closing(Prometheus(tmp_path, CONFIG)) as prometheus:
        assert eventually(lambda: len((prometheus.ask("alerts") or {"alerts": []})["alerts"]) == 3)

        firing, pending = prometheus_alerts(get, f"http://{prometheus.address}", "night-7")

    assert (firing.name, firing.severity) == ("ZerowatchStragglerRank", "warning")
    assert firing.text == "rank 3 is slow by 0.21"
    assert (pending.name, pending.is_pending) == ("ZerowatchDataBound", True)
