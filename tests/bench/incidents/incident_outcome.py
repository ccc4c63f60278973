"""What Alertmanager reported about an incident, whether that is right, and its row of the table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.incidents.hardware_incidents import HARDWARE_INCIDENTS
from bench.incidents.incident_run import host_of_faulty_rank
from bench.incidents.planted_incidents import INCIDENTS, Incident
from bench.result_table import Row

from zerowatch.dashboards.prometheus_files import NOTIFICATION_SECONDS

PREFIX = "Zerowatch"
LISTS = {"training": INCIDENTS, "hardware": HARDWARE_INCIDENTS}
BY_NAME = {incident.name: incident for members in LISTS.values() for incident in members}
_RUNBOOK = Path(__file__).parents[3] / "dashboards" / "runbook.md"
_WAITS_FIRST = (
    "rank 0 waits, and RankHung reports that after 30 s or ten steps; RankVanished waits for 75 s "
    "without an answer, so that one failed scrape a minute raises nothing"
)
# Where the definitions of the alerts contradict the list: why the expected alert is not the first.
# The list stays as it was committed, and such a row stays a missed goal.
CONTRADICTIONS = {
    "rank-killed": _WAITS_FIRST,
    "rank-stopped": _WAITS_FIRST,
    "target-vanished": _WAITS_FIRST,
    "skipped-steps": (
        "the gradient norm of an overflow is infinite, which GradientNormExploding reports after "
        "a minute; UpdatesSkipped waits for five minutes, because a few skipped steps are usual"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FiredAlert:
    """One alert that Alertmanager held.

    Attributes:
        seconds: From the incident until then, as measured; negative if it came before.
        lasted_seconds: How long Alertmanager held it; None if it still did at the end.
        was_heard: Whether no other alert inhibited it, at any time.
    """

    labels: dict[str, str]
    annotations: dict[str, str]
    seconds: float
    lasted_seconds: float | None
    was_heard: bool

    @property
    def name(self) -> str:
        """The name without the prefix of all our alerts."""
        return self.labels["alertname"].removeprefix(PREFIX)

    @property
    def has_page(self) -> bool:
        """Whether the alert links to its own page of the runbook, and the page exists."""
        anchor = self.annotations.get("runbook_url", "").partition("#")[2]
        return anchor == self.labels["alertname"].lower() and anchor in _anchors()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The alerts of one incident.

    Attributes:
        name: The incident.
        planted: When, as text.
        scale: By what all waits were multiplied.
        load: Mean number of running processes in the minute before the runs were started.
        fired: The alerts of its run, in the order in which Alertmanager got them.
        messages: The lines that the receiver of Alertmanager's messages wrote about the run.
        after_end: The names of alerts that came after the incident was taken away.
        ended_seconds: From the end of the incident until the expected alert ended, as measured;
            None if the incident was not taken away.
        failure: Why the incident was not planted; empty if it was.
    """

    name: str
    planted: str
    scale: float
    load: float
    fired: Sequence[FiredAlert] = ()
    messages: Sequence[str] = ()
    after_end: Sequence[str] = ()
    ended_seconds: float | None = None
    failure: str = ""

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Outcome:
        """Return what `as_json` wrote."""
        fired = tuple(FiredAlert(**each) for each in content["fired"])
        names = {name: tuple(content[name]) for name in ("messages", "after_end")}
        return cls(**{**content, **names, "fired": fired})

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def incident(self) -> Incident:
        return BY_NAME[self.name]

    @property
    def expected(self) -> FiredAlert | None:
        """The expected alert, once the incident was planted."""
        return next((one for one in self._since() if one.name == self.incident.alert), None)

    @property
    def first(self) -> Sequence[FiredAlert]:
        """The alerts that fired first, at the same look, once the incident was planted."""
        earliest = min((one.seconds for one in self._since()), default=0.0)
        return [one for one in self._since() if one.seconds == earliest]

    @property
    def false_alerts(self) -> list[str]:
        """The alerts that are neither expected nor a consequence of the incident."""
        rightly = {self.incident.alert, *self.incident.also}
        return sorted(
            {one.name for one in self._heard() if one.name not in rightly or one.seconds < 0}
        )

    @property
    def hosts(self) -> list[str]:
        """The hosts that the expected alert names, by all its ranks."""
        named = (one.labels.get("node") for one in self.fired if one.name == self.incident.alert)
        return sorted({node for node in named if node})

    @property
    def is_first(self) -> bool:
        """Whether the expected alert was the first one; if none is expected, whether none fired."""
        if self.incident.alert is None:
            return not self.first
        return self.incident.alert in {one.name for one in self.first}

    @property
    def is_useful(self) -> bool:
        """Whether the expected alert came in time, complete, and without a false one."""
        incident, expected = self.incident, self.expected
        if self.failure or self.false_alerts:
            return False
        if incident.alert is None:
            return not self.first
        if expected is None or not expected.has_page:
            return False
        if incident.names_host and host_of_faulty_rank(self.name) not in self.hosts:
            return False
        return incident.goal_seconds is None or self.real_seconds(expected) <= incident.goal_seconds

    def real_seconds(self, alert: FiredAlert) -> float:
        """Return the seconds until the first message about an alert, without the scale."""
        wait_seconds = NOTIFICATION_SECONDS[alert.labels["severity"]][0]
        return alert.seconds / self.scale + wait_seconds

    def row(self) -> Row:
        """Return the incident as a row of the table."""
        incident = self.incident
        goal = incident.alert or "no alert"
        if incident.goal_seconds is not None:
            goal += f" within {incident.goal_seconds:.0f} s"
        return Row(
            what=self.name,
            measured=f"NOT PLANTED: {self.failure}" if self.failure else "; ".join(self._parts()),
            spread="; ".join(self._remarks()),
            goal=goal,
            met=not self.failure and self.is_first and self.is_useful,
        )

    def _parts(self) -> Iterable[str]:
        """Return the expected alert, an earlier one, and the false ones."""
        if self.expected is not None:
            yield self._shown(self.expected)
            if self.incident.names_host:
                right = host_of_faulty_rank(self.name) in self.hosts
                yield f"host {'yes' if right else 'NO'} ({', '.join(self.hosts) or 'none'})"
            yield f"page {'yes' if self.expected.has_page else 'NO'}"
        elif self.incident.alert is not None or not self.first:
            yield "no alert" if not self.first else "NOT FIRED"
        if not self.is_first and self.first:
            yield "first: " + ", ".join(map(self._shown, self.first))
        if self.false_alerts:
            yield f"FALSE: {', '.join(self.false_alerts)}"

    def _remarks(self) -> Iterable[str]:
        """Return the later alerts, the inhibited ones, the end, and why the list is wrong."""
        shown = {one.name for one in self.first} | {self.incident.alert}
        later: dict[str, FiredAlert] = {}
        for one in self._since():
            if one.name not in shown:
                later.setdefault(one.name, one)
        if later:
            yield "then " + ", ".join(map(self._shown, later.values()))
        if muted := {one.name for one in self.fired} - {one.name for one in self._heard()}:
            yield f"inhibited: {', '.join(sorted(muted))}"
        if self.ended_seconds is not None:
            yield f"ended {self.ended_seconds / self.scale:.0f} s after the incident"
        if self.after_end:
            yield f"after its end: {', '.join(self.after_end)}"
        if not self.is_first and self.name in CONTRADICTIONS:
            yield f"the list contradicts the alerts: {CONTRADICTIONS[self.name]}"

    def _shown(self, alert: FiredAlert) -> str:
        return f"{alert.name} after {self.real_seconds(alert):.0f} s"

    def _heard(self) -> list[FiredAlert]:
        return [one for one in self.fired if one.was_heard]

    def _since(self) -> list[FiredAlert]:
        """Return the alerts since the incident that were not inhibited all the time."""
        return [one for one in self._heard() if one.seconds >= 0]


@cache
def _anchors() -> frozenset[str]:
    headings = re.findall(r"^#+ (\S+)$", _RUNBOOK.read_text(), re.MULTILINE)
    return frozenset(heading.lower() for heading in headings)
