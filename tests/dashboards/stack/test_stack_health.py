"""Tests of the lines on targets, rules and alerts that `zerowatch stack status` prints."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from zerowatch.dashboards.alerts import prometheus
from zerowatch.dashboards.stack.stack_health import (
    NO_WATCHDOG,
    RUNBOOK,
    WATCHDOG,
    alert_lines,
    answers,
    health_lines,
    rule_lines,
    target_lines,
)

NO_RUN = "no run yet"

WATCHDOG_ALERT = {
    "labels": {"alertname": WATCHDOG, "severity": "none"},
    "annotations": {},
    "status": {"state": "active"},
}


def target(
    rank: int, *, health: str = "up", error: str = "", job: str = "zerowatch"
) -> dict[str, Any]:
    return {
        "labels": {"job": job, "run": "night-7", "node": "a", "rank": str(rank)},
        "scrapeUrl": f"http://a:{9464 + rank}/metrics",
        "health": health,
        "lastError": error,
    }


class EmptyResults(BaseHTTPRequestHandler):
    """Answers each request as Prometheus does that has nothing, or Alertmanager without alerts."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        empty = {"data": {"activeTargets": [], "groups": [], "result": []}}
        self.wfile.write(json.dumps([] if "/v2/" in self.path else empty).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_a_proxy_of_the_environment_is_not_asked_for_servers_of_this_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # nothing listens there
    with HTTPServer(("127.0.0.1", 0), EmptyResults) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            answered = answers(url)
            lines = health_lines(url, url, no_run=NO_RUN)
        finally:
            server.shutdown()
            thread.join()

    assert answered
    assert lines[0] == NO_RUN
    assert lines[-1] == NO_WATCHDOG


def test_reachable_ranks_are_listed_in_numerical_order() -> None:
    lines = target_lines([target(10), target(2)], ended=[], no_run=NO_RUN)

    assert lines == [
        "run night-7 rank 2: up, http://a:9466/metrics",
        "run night-7 rank 10: up, http://a:9474/metrics",
    ]


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (
            'Get "http://a:9464/metrics": dial tcp 10.0.0.1:9464: connect: connection refused',
            "serve.host",
        ),
        ("dial tcp: lookup a on 10.0.0.2:53: no such host", "serve.advertise_host"),
        ("context deadline exceeded", "a firewall"),
        (
            'net/http: HTTP/1.x transport connection broken: malformed HTTP response "\\x15"',
            "scheme: https",
        ),
        ("server returned HTTP status 401 Unauthorized", "a token or a password"),
        ("server returned HTTP status 404 Not Found", "another run or program"),
        ("server returned HTTP status 500 Internal Server Error", "the log of the job"),
    ],
)
def test_an_unreachable_rank_is_reported_with_the_reason_and_what_to_do(
    error: str, cure: str
) -> None:
    (line,) = target_lines([target(0, health="down", error=error)], ended=[], no_run=NO_RUN)

    assert line.startswith("run night-7 rank 0: DOWN, http://a:9464/metrics: ")
    assert error in line
    assert cure in line


def test_a_rank_that_was_not_scraped_yet_is_not_reported_as_unknown() -> None:
    lines = target_lines([target(0, health="unknown")], ended=[], no_run=NO_RUN)

    assert lines == ["run night-7 rank 0: not scraped yet, http://a:9464/metrics"]


def test_a_rank_that_ended_normally_is_not_reported_as_down() -> None:
    targets = [target(0, health="down", error="connection refused")]

    lines = target_lines(targets, ended=[{"run": "night-7", "rank": "0"}], no_run=NO_RUN)

    assert lines == ["run night-7 rank 0: ended"]


def test_without_targets_the_given_line_is_returned() -> None:
    assert target_lines([target(0, job="node")], ended=[], no_run=NO_RUN) == [NO_RUN]


def test_failing_rules_are_reported_with_their_error() -> None:
    rules = [
        {"name": "run:x:rate5m", "health": "ok"},
        {"name": "run:y:rate5m", "health": "err", "lastError": "many-to-many matching"},
    ]

    assert rule_lines([{"rules": rules}]) == [
        "rules: 2, 1 of them fail",
        "rule run:y:rate5m fails: many-to-many matching",
    ]


def test_inhibited_and_silenced_alerts_are_only_counted() -> None:
    alerts = [
        {
            "labels": {"alertname": "ZerowatchRankVanished", "run": "night-7", "rank": "1"},
            "annotations": {"summary": "Rank 1 does not answer"},
            "status": {"state": "active"},
        },
        {
            "labels": {"alertname": "ZerowatchTrainingStalled", "run": "night-7"},
            "annotations": {},
            "status": {"state": "suppressed"},
        },
    ]

    assert alert_lines([*alerts, WATCHDOG_ALERT]) == [
        "alerts: 1 firing, 1 held back",
        "ZerowatchRankVanished run=night-7 rank=1: Rank 1 does not answer",
        f"what to do, by alert: {RUNBOOK}",
    ]
    assert "## ZerowatchRankVanished" in RUNBOOK.read_text()


def test_a_missing_watchdog_is_reported_and_a_firing_one_is_no_alert() -> None:
    assert alert_lines([WATCHDOG_ALERT]) == ["alerts: 0 firing"]
    assert alert_lines([]) == ["alerts: 0 firing", NO_WATCHDOG]
    assert prometheus.WATCHDOG == WATCHDOG
