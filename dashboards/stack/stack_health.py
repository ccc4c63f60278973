"""Reports the state of a running stack: reachable ranks, failing rules, firing alerts."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...metrics.catalog.training import RUN_ACTIVE
from ..promql import select
from .prometheus_config import JOB

TIMEOUT_SECONDS = 5.0
# The servers are on this host. A proxy of the environment (http_proxy) cannot reach them.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
RUNBOOK = Path(__file__).resolve().parent.parent / "runbook.md"
# Selects the ranks that ended normally. Prometheus keeps targets that it got by HTTP until another
# run has the same addresses, and reports them as down.
ENDED = f"last_over_time({select(RUN_ACTIVE)}[1d]) == 0"
# Part of the error that Prometheus reports for a failed scrape, and what to do. The first match
# is used.
_ADVICE = (
    (
        "connection refused",
        "nothing listens there: the job has crashed or was killed, or ended while Prometheus was "
        "down, or it serves on 127.0.0.1 of another machine or container; then set serve.host",
    ),
    (
        "HTTP status 401",
        "the job asks for a token or a password, as serve.auth_token_file or serve.basic_auth_file "
        "is set: give it to Prometheus",
    ),
    ("HTTP status 404", "another run or program serves at that address; this one has ended"),
    (
        "no such host",
        "Prometheus does not know that name: set serve.advertise_host to one that it does",
    ),
    ("deadline exceeded", "no answer in time: a firewall, or a job that is stopped"),
    ("certificate", "set scheme and tls_config in Prometheus, as the job serves by TLS"),
    ("malformed HTTP response", "the job serves by TLS: set scheme: https in Prometheus"),
)

# The alert that always fires; test_stack_health.py compares the name.
WATCHDOG = "ZerowatchWatchdog"
NO_WATCHDOG = (
    f"alerts of Prometheus do not reach Alertmanager: {WATCHDOG}, which always fires, is missing. "
    "After a start this takes up to a minute; otherwise see the logs of both"
)

Labels = Mapping[str, str]


def health_lines(prometheus: str, alertmanager: str, *, no_run: str) -> list[str]:
    """Return lines on reachable ranks, failing rules and firing alerts.

    Args:
        prometheus: The URL of Prometheus.
        alertmanager: The URL of Alertmanager.
        no_run: The line to return if Prometheus has no targets of a run.
    """
    targets = _ask(f"{prometheus}/api/v1/targets?state=active")
    if targets is None:
        return [f"Prometheus does not answer on {prometheus}; it may still be starting"]
    query = urllib.parse.urlencode({"query": ENDED})
    ended = _ask(f"{prometheus}/api/v1/query?{query}") or {}
    rules = _ask(f"{prometheus}/api/v1/rules") or {}
    alerts = _ask(f"{alertmanager}/api/v2/alerts")
    return [
        *target_lines(
            targets["data"]["activeTargets"],
            ended=[series["metric"] for series in ended.get("data", {}).get("result", [])],
            no_run=no_run,
        ),
        *rule_lines(rules.get("data", {}).get("groups", [])),
        *(
            [f"Alertmanager does not answer on {alertmanager}; it may still be starting"]
            if alerts is None
            else alert_lines(alerts)
        ),
    ]


def target_lines(
    targets: Iterable[Mapping[str, Any]], *, ended: Iterable[Labels], no_run: str
) -> list[str]:
    """Return a line for each rank: whether Prometheus reaches it, and what to do if not.

    Args:
        targets: The list `activeTargets` of the API of Prometheus.
        ended: The labels of the ranks that ended normally.
        no_run: The line to return if there are no targets of a run.
    """
    over = {(labels.get("run"), labels.get("rank")) for labels in ended}
    ours = [target for target in targets if target["labels"].get("job") == JOB]
    if not ours:
        return [no_run]
    return [_target_line(target, over) for target in sorted(ours, key=_order)]


def _target_line(target: Mapping[str, Any], over: set[tuple[str | None, str | None]]) -> str:
    labels = target["labels"]
    name = f"run {labels.get('run', '-')} rank {labels.get('rank', '-')}"
    if target["health"] == "unknown":
        return f"{name}: not scraped yet, {target['scrapeUrl']}"
    if target["health"] != "down":
        return f"{name}: {target['health']}, {target['scrapeUrl']}"
    if (labels.get("run"), labels.get("rank")) in over:
        return f"{name}: ended"
    error = target["lastError"]
    advice = next((text for part, text in _ADVICE if part in error), "see the log of the job")
    return f"{name}: DOWN, {target['scrapeUrl']}: {error} ({advice})"


def _order(target: Mapping[str, Any]) -> tuple[str, int, str]:
    rank = target["labels"].get("rank", "")
    return target["labels"].get("run", ""), int(rank) if rank.isdigit() else -1, rank


def rule_lines(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the number of rules, and a line for each rule that cannot be evaluated."""
    rules = [rule for group in groups for rule in group["rules"]]
    failed = [rule for rule in rules if rule["health"] == "err"]
    failures = [f"rule {rule['name']} fails: {rule.get('lastError', '')}" for rule in failed]
    return [f"rules: {len(rules)}, {len(failed)} of them fail", *failures]


def alert_lines(alerts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each firing alert; silenced and inhibited alerts are only counted.

    The watchdog is not listed. It always fires, and without it no alert reaches Alertmanager.
    """
    received = list(alerts)
    all_alerts = [alert for alert in received if alert["labels"]["alertname"] != WATCHDOG]
    firing = [alert for alert in all_alerts if alert["status"]["state"] != "suppressed"]
    held_back = len(all_alerts) - len(firing)
    return [
        f"alerts: {len(firing)} firing" + (f", {held_back} held back" if held_back else ""),
        *sorted(_alert_line(alert["labels"], alert["annotations"]) for alert in firing),
        *([f"what to do, by alert: {RUNBOOK}"] if firing else []),
        *([] if len(received) > len(all_alerts) else [NO_WATCHDOG]),
    ]


def _alert_line(labels: Labels, annotations: Labels) -> str:
    names = ("run", "rank", "node")
    where = " ".join(f"{name}={labels[name]}" for name in names if name in labels)
    return f"{labels['alertname']} {where}: {annotations.get('summary', '')}"


def answers(url: str) -> bool:
    """Whether a request for the URL succeeds."""
    try:
        with _OPENER.open(url, timeout=TIMEOUT_SECONDS):
            return True
    except OSError:  # urllib.error.URLError is one
        return False


def _ask(url: str) -> Any:
    """Return the JSON at a URL; None if the request fails."""
    try:
        with _OPENER.open(url, timeout=TIMEOUT_SECONDS) as response:
            return json.load(response)
    except (OSError, json.JSONDecodeError):
        return None
