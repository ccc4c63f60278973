"""What an alert is: when it is raised, what it says, and which others it makes superfluous."""

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
    """Where an alert's links lead: the page of runbooks, and Grafana."""

    runbook: str = "https://github.com/zerowatch/zerowatch/blob/main/dashboards/runbook.md"
    grafana: str = "http://127.0.0.1:3000"


@dataclass(frozen=True, slots=True, kw_only=True)
class InhibitRule:
    """What an alert silences: those of its consequences that nobody needs to be told of as well.

    Attributes:
        alerts: Names of the silenced; none stands for all others.
        same: The labels in which the two must agree.
    """

    alerts: tuple[str, ...] = ()
    same: tuple[str, ...] = IDENTITY


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert.

    Attributes:
        expression: PromQL that has a result while something is wrong, one per alert.
        for_seconds: For how long, before the alert is raised.
        keep_firing_seconds: How long the alert stays after that is over, so that it does not flap.
        summary: What is wrong, without figures: it is the same each time the alert is sent.
        description: The value that raised it, and what to do first.
        dashboard: The uid of the dashboard that shows it.
        silences: What it makes superfluous.
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
    silences: InhibitRule | None = None

    @property
    def labels(self) -> dict[str, str]:
        """The labels by which an alert is routed."""
        return {"component": self.component, "severity": self.severity}

    def annotations(self, links: Links) -> dict[str, str]:
        """What an alert says, and where it leads."""
        # Without blanks, so that YAML breaks no address into two lines.
        variables = "&".join(f"var-{name}={{{{$labels.{name}|urlquery}}}}" for name in IDENTITY)
        return {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": f"{links.runbook}#{self.name.lower()}",
            "dashboard_url": f"{links.grafana}/d/{self.dashboard}?{variables}",
        }
