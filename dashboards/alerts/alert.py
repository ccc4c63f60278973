"""The description of an alert: expression, texts, labels, and the alerts that it inhibits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..promql import IDENTITY

Severity = Literal["critical", "warning", "info"]
Component = Literal["communication", "training", "memory", "devices", "watch", "tuner"]

# Filled in by Prometheus when it sends the alert.
RUN = "{{ $labels.run }}"
RANK = "{{ $labels.rank }}"
PERCENT = "{{ $value | humanizePercentage }}"
BYTES = "{{ $value | humanize1024 }}B"
NUMBER = '{{ $value | printf "%.0f" }}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The addresses of an alert's links: the runbook and Grafana."""

    runbook: str = "https://github.com/zerowatch/zerowatch/blob/main/dashboards/runbook.md"
    grafana: str = "http://127.0.0.1:3000"


@dataclass(frozen=True, slots=True, kw_only=True)
class InhibitRule:
    """The alerts that an alert inhibits: its consequences.

    Attributes:
        alerts: Names of the inhibited alerts; empty means all others.
        same: The labels in which the two must agree.
    """

    alerts: tuple[str, ...] = ()
    same: tuple[str, ...] = IDENTITY


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert.

    Attributes:
        expression: PromQL that has a result while something is wrong, one per alert.
        for_seconds: How long the expression must hold before the alert fires.
        keep_firing_seconds: How long it stays after the expression ends, against flapping.
        summary: What is wrong, without figures, so that it is the same in each notification.
        description: The value, and what to do first.
        dashboard: The uid of the dashboard that shows it.
        inhibits: The alerts that it inhibits.
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
        """The labels by which an alert is routed."""
        return {"component": self.component, "severity": self.severity}

    def annotations(self, links: Links) -> dict[str, str]:
        """The texts and links of an alert."""
        # Without blanks, so that YAML breaks no address into two lines.
        variables = "&".join(f"var-{name}={{{{$labels.{name}|urlquery}}}}" for name in IDENTITY)
        return {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": f"{links.runbook}#{self.name.lower()}",
            "dashboard_url": f"{links.grafana}/d/{self.dashboard}?{variables}",
        }
