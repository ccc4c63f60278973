"""What a running Prometheus and Alertmanager say: which runs are reached, which rules fail."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any

from ..metrics.catalog.training import RUN_ACTIVE
from .promql import select

JOB = "zerowatch"
TIMEOUT_SECONDS = 5.0
# Targets of a run stay in Prometheus as long as no other run takes their place.
ENDED = f"last_over_time({select(RUN_ACTIVE)}[1d]) == 0"
# Prometheus' error when a scrape fails, and what to do. The first that matches is used.
_CURES = (
    (
        "connection refused",
        "nothing listens there: the job has crashed or was killed, or ended more than a day ago, "
        "or it serves on 127.0.0.1 of another machine or container; then set serve.host",
    ),
    (
        "no such host",
        "Prometheus does not know that name: set serve.advertise_host to one that it does",
    ),
    ("deadline exceeded", "no answer in time: a firewall, or a job that is stopped"),
    ("certificate", "set scheme and tls_config in Prometheus, as the job serves by TLS"),
    ("malformed HTTP response", "the job serves by TLS: set scheme: https in Prometheus"),
)

Labels = Mapping[str, str]


def health_lines(prometheus: str, alertmanager: str, *, no_run: str) -> list[str]:
    """Ask both and report their state.

    Args:
        prometheus: Its URL.
        alertmanager: Its URL.
        no_run: What to say where Prometheus knows no run.
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
    """Say of each rank whether Prometheus reaches it, and what to do if it does not.

    Args:
        targets: `activeTargets` of Prometheus' API.
        ended: Labels of the ranks whose run was closed in an orderly way.
        no_run: What to say where there is none.
    """
    over = {(labels.get("run"), labels.get("rank")) for labels in ended}
    ours = [target for target in targets if target["labels"].get("job") == JOB]
    if not ours:
        return [no_run]
    return [_target_line(target, over) for target in sorted(ours, key=_order)]


def _target_line(target: Mapping[str, Any], over: set[tuple[str | None, str | None]]) -> str:
    labels = target["labels"]
    name = f"run {labels.get('run', '-')} rank {labels.get('rank', '-')}"
    if target["health"] != "down":
        return f"{name}: {target['health']}, {target['scrapeUrl']}"
    if (labels.get("run"), labels.get("rank")) in over:
        return f"{name}: ended"
    error = target["lastError"]
    cure = next((cure for sign, cure in _CURES if sign in error), "see the log of the job")
    return f"{name}: DOWN, {target['scrapeUrl']}: {error} ({cure})"


def _order(target: Mapping[str, Any]) -> tuple[str, int, str]:
    rank = target["labels"].get("rank", "")
    return target["labels"].get("run", ""), int(rank) if rank.isdigit() else -1, rank


def rule_lines(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Say how many rules there are, and which of them cannot be evaluated."""
    rules = [rule for group in groups for rule in group["rules"]]
    failed = [rule for rule in rules if rule["health"] == "err"]
    failures = [f"rule {rule['name']} fails: {rule.get('lastError', '')}" for rule in failed]
    return [f"rules: {len(rules)}, {len(failed)} of them fail", *failures]


def alert_lines(alerts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Name the alerts that fire; the silenced and inhibited ones are only counted."""
    all_alerts = list(alerts)
    firing = [alert for alert in all_alerts if alert["status"]["state"] != "suppressed"]
    held_back = len(all_alerts) - len(firing)
    return [
        f"alerts: {len(firing)} firing" + (f", {held_back} held back" if held_back else ""),
        *sorted(_alert_line(alert["labels"], alert["annotations"]) for alert in firing),
    ]


def _alert_line(labels: Labels, annotations: Labels) -> str:
    where = " ".join(f"{name}={labels[name]}" for name in ("run", "rank") if name in labels)
    return f"{labels['alertname']} {where}: {annotations.get('summary', '')}"


def answers(url: str) -> bool:
    """Return whether a page exists."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS):
            return True
    except OSError:  # urllib.error.URLError is one
        return False


def _ask(url: str) -> Any:
    """Return the JSON behind a URL; None where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
            return json.load(response)
    except (OSError, json.JSONDecodeError):
        return None
