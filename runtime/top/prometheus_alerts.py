"""Reads the alerts of a run from Prometheus."""

from __future__ import annotations

from typing import Any

import orjson

from ...metrics.thresholds import SEVERITIES
from .http_client import Get, NoAnswerError
from .run_view import AlertView


def prometheus_alerts(get: Get, url: str, run_id: str) -> list[AlertView]:
    """Return the alerts of a run that fire or are pending, critical ones first.

    Args:
        get: Returns a page.
        url: The address of Prometheus, such as "http://127.0.0.1:9090".
        run_id: The run, the label `run` of its alerts.

    Raises:
        NoAnswerError: Prometheus does not answer, or something else does.
    """
    try:
        alerts = orjson.loads(get(f"{url.rstrip('/')}/api/v1/alerts").body)["data"]["alerts"]
        found = [_alert(alert) for alert in alerts if alert["labels"].get("run") == run_id]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NoAnswerError("its answer is not that of Prometheus") from None
    return sorted(
        found, key=lambda alert: (alert.is_pending, SEVERITIES.index(alert.severity), alert.name)
    )


def _alert(alert: dict[str, Any]) -> AlertView:
    labels, annotations = alert["labels"], alert.get("annotations", {})
    severity = labels.get("severity")
    rank = labels.get("rank")
    text = annotations.get("summary") or annotations.get("description") or ""
    if rank is not None and f"rank {rank}" not in text.lower():
        text = f"rank {rank}: {text}"
    return AlertView(
        severity=severity if severity in SEVERITIES else "warning",
        name=str(labels.get("alertname", "")),
        text=str(text),
        is_pending=alert.get("state") == "pending",
    )
