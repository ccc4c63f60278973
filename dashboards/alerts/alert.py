"""Defines the data of an alert: expression, duration, texts, labels and inhibited alerts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..promql import IDENTITY

Severity = Literal["critical", "warning", "info"]
Component = Literal["communication", "training", "memory", "devices", "watch", "tuner"]

# Template expressions, which Prometheus replaces when it sends the alert.
RUN = "{{ $labels.run }}"
RANK = "{{ $labels.rank }}"
PERCENT = "{{ $value | humanizePercentage }}"
BYTES = "{{ $value | humanize1024 }}B"
NUMBER = '{{ $value | printf "%.0f" }}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The base addresses of the links in an alert: the runbook and Grafana."""

    runbook: str = "https://github.com/zerowatch/zerowatch/blob/main/dashboards/runbook.md"
    grafana: str = "http://127.0.0.1:3000"


@dataclass(frozen=True, slots=True, kw_only=True)
class InhibitRule:
    """The alerts that a firing alert inhibits, because they are its consequences.

    Attributes:
        alerts: The names of the inhibited alerts; empty means all others.
        same: The labels that must be equal in both alerts.
    """

    alerts: tuple[str, ...] = ()
    same: tuple[str, ...] = IDENTITY


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alerting rule of Prometheus.

    Attributes:
        name: The name, such as ZerowatchRankDown; also the anchor of its page in the runbook.
        component: What the alert is about; a label for routing.
        severity: How urgent the alert is; a label for routing.
        expression: PromQL. The alert is active once for each series of the result.
        for_seconds: How long a series must be present before the alert fires.
        keep_firing_seconds: How long the alert fires after the series is gone, so that it does not
            flap.
        summary: What is wrong. It has no figures, so that it is the same in each notification.
        description: The current value, what it means and what to do first.
        dashboard: The uid of the dashboard to which the alert links.
        inhibits: The alerts that this alert inhibits; None if it inhibits none.
    """

    name: str
    component: Component
    severity: Severity
    expression: str
    for_seconds: float
    keep_firing_seconds: float
    summary: str
    description: str
    dashboard: str
    inhibits: InhibitRule | None = None

    @property
    def labels(self) -> dict[str, str]:
        """The labels by which Alertmanager routes the alert."""
        return {"component": self.component, "severity": self.severity}

    def annotations(self, links: Links) -> dict[str, str]:
        """Return the texts and links that a notification shows."""
        # Without spaces in the templates, because YAML would wrap the address at a space.
        variables = "&".join(f"var-{name}={{{{$labels.{name}|urlquery}}}}" for name in IDENTITY)
        return {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": f"{links.runbook}#{self.name.lower()}",
            "dashboard_url": f"{links.grafana}/d/{self.dashboard}?{variables}",
        }
