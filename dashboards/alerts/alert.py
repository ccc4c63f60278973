"""Defines the data of an alert: expression, duration, texts, labels and inhibited alerts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..promql import IDENTITY

Severity = Literal["critical", "warning", "info", "none"]
Component = Literal[
    "communication", "training", "memory", "devices", "watch", "tuner", "prometheus"
]

# Template expressions, which Prometheus replaces when it sends the alert.
RUN = "{{ $labels.run }}"
RANK = "{{ $labels.rank }}"
NODE = "{{ $labels.node }}"
DEVICE = "{{ $labels.device }}"
PERCENT = "{{ $value | humanizePercentage }}"
BYTES = "{{ $value | humanize1024 }}B"
NUMBER = '{{ $value | printf "%.0f" }}'
DURATION = "{{ $value | humanizeDuration }}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The base addresses of the links in an alert.

    By default the same rules are used everywhere, and Prometheus fills in the addresses from its
    external labels `zerowatch_runbook` and `zerowatch_grafana`. Without them there is no link.

    Attributes:
        runbook: The address of the runbook, whose pages have anchors.
        grafana: The address of Grafana.
    """

    runbook: str = ""
    grafana: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InhibitRule:
    """The alerts that a firing alert inhibits, because they are its consequences.

    Attributes:
        alerts: The names of the inhibited alerts.
        less_urgent: Whether all alerts of zerowatch that are not critical are inhibited, too.
            Critical ones may explain the alert.
        same: The labels that must be equal in both alerts.
    """

    alerts: tuple[str, ...] = ()
    less_urgent: bool = False
    same: tuple[str, ...] = IDENTITY


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alerting rule of Prometheus.

    Attributes:
        name: The name, such as ZerowatchRunDied; also the anchor of its page in the runbook.
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
        about_run: Whether the alert is about a run, and not about Prometheus or Alertmanager.
        page: The heading of its page in the runbook, if that is not its name.
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
    about_run: bool = True
    page: str = ""

    @property
    def labels(self) -> dict[str, str]:
        """The labels by which Alertmanager routes the alert."""
        return {"component": self.component, "severity": self.severity}

    def annotations(self, links: Links) -> dict[str, str]:
        """Return the texts and links that a notification shows."""
        # Without spaces in the templates, because YAML would wrap the address at a space.
        variables = "&".join(f"var-{name}={{{{$labels.{name}|urlquery}}}}" for name in IDENTITY)
        query = f"?{variables}" if self.about_run else ""
        return {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": _link(links.runbook, "runbook", f"#{(self.page or self.name).lower()}"),
            "dashboard_url": _link(links.grafana, "grafana", f"/d/{self.dashboard}{query}"),
        }


def _link(base: str, external_label: str, path: str) -> str:
    """Return a link, or the template of a link whose base is an external label."""
    if base:
        return base + path
    return f"{{{{with $externalLabels.zerowatch_{external_label}}}}}{{{{.}}}}{path}{{{{end}}}}"
