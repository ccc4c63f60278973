"""Plants incidents in real training runs, and reports which alert fires first, and how soon.

Each incident has a run of its own: two ranks on two hosts (network and host name namespaces). One
real Prometheus and one real Alertmanager with the shipped rules watch all of them. Ranges and waits
of the rules are multiplied by `SCALE`; so are the scrape interval and the timeout of hangs. What
the runs do themselves, such as the comparison of ranks once a second, is not scaled, so that the
times are too long rather than too short. promtool tests the true waits (`tests/rules`).

A time is that until Alertmanager holds the alert, divided by `SCALE`, plus the time for which
Alertmanager waits before it sends the first message (`group_wait`).
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.bench_options import Options
from bench.incidents.incident_run import IncidentRun, host_of_faulty_rank, incident_run
from bench.incidents.planted_incidents import INCIDENTS, Incident
from bench.result_table import Row
from lab.alerting import AlertHistory, Spell, alerting
from lab.two_hosts import missing

from zerowatch.dashboards.prometheus_files import NOTIFICATION_SECONDS
from zerowatch.dashboards.timing import Timing
from zerowatch.metrics.atomic_file import atomic_write

SCALE = 1 / 15
RUNS_AT_ONCE = 3  # of two ranks each, which mostly sleep
STARTING_SECONDS = 180.0
# What the rules know of a run before its incident: 15 minutes.
USUAL_SECONDS = 15 * 60 * SCALE
# How long a run is watched for its alert if there is no goal, and for other alerts after it.
PATIENCE_SECONDS = 45 * 60 * SCALE
AFTERWARDS_SECONDS = 5 * 60 * SCALE
PREFIX = "Zerowatch"
RUNBOOK = Path(__file__).parents[3] / "dashboards" / "runbook.md"
# Fires always, by design.
ALWAYS = {"ZerowatchWatchdog"}
QUICK = ("rank-killed", "loss-nan", "normal-end")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The alerts of one incident.

    Attributes:
        planted_at: By the monotonic clock.
        spells: The alerts of its run, in the order in which Alertmanager got them.
    """

    incident: Incident
    planted_at: float
    spells: Sequence[Spell]

    @property
    def first(self) -> Spell | None:
        """The alert that fired first, once the incident was planted."""
        return next((each for each in self.spells if each.seen >= self.planted_at), None)

    @property
    def false_alerts(self) -> list[str]:
        """The alerts that are neither expected nor a consequence of the incident."""
        incident = self.incident
        rightly = {PREFIX + name for name in (incident.alert, *incident.also) if name}
        too_soon = [spell for spell in self.spells if spell.seen < self.planted_at]
        return sorted((names(self.spells) - rightly) | names(too_soon))

    @property
    def seconds(self) -> float | None:
        """Seconds of real time until the first message about the expected alert."""
        wanted = f"{PREFIX}{self.incident.alert}"
        for spell in self.spells:
            if spell.labels["alertname"] == wanted and spell.seen >= self.planted_at:
                wait_seconds = NOTIFICATION_SECONDS[spell.labels["severity"]][0]
                return (spell.seen - self.planted_at) / SCALE + wait_seconds
        return None

    @property
    def is_right(self) -> bool:
        """Whether the expected alert was first, in time and labelled right, and none was false."""
        incident, first = self.incident, self.first
        if self.false_alerts:
            return False
        if incident.alert is None:
            return first is None
        if first is None or first.labels["alertname"] != PREFIX + incident.alert:
            return False
        in_time = incident.goal_seconds is None or (self.seconds or 0) <= incident.goal_seconds
        return in_time and self.names_host in (True, None) and has_page(first)

    @property
    def names_host(self) -> bool | None:
        """Whether the expected alert names the host of the faulty rank; None if it need not."""
        if not self.incident.names_host or self.first is None:
            return None
        wanted = f"{PREFIX}{self.incident.alert}"
        hosts = {
            each.labels.get("node") for each in self.spells if each.labels["alertname"] == wanted
        }
        return host_of_faulty_rank(self.incident.name) in hosts

    def row(self) -> Row:
        """Return the incident as a row of the table."""
        incident, first = self.incident, self.first
        shown = "no alert" if first is None else first.labels["alertname"].removeprefix(PREFIX)
        if self.seconds is not None:
            shown += f" after {self.seconds:.0f} s"
        if self.names_host is not None:
            shown += f", host {'yes' if self.names_host else 'NO'}"
        if first is not None and not has_page(first):
            shown += ", no runbook page"
        if self.false_alerts:
            shown += f"; false: {', '.join(self.false_alerts)}"
        goal = incident.alert or "no alert"
        if incident.goal_seconds is not None:
            goal += f" within {incident.goal_seconds:.0f} s"
        others = names(self.spells) - ({first.labels["alertname"]} if first else set())
        later = ", ".join(sorted(name.removeprefix(PREFIX) for name in others))
        return Row(what=incident.name, measured=shown, spread=later, goal=goal, met=self.is_right)


def bench(options: Options) -> Iterator[Row]:
    """Yield a row for each incident, and how many raised the right alert."""
    if (reason := missing()) is not None:
        yield Row(what="incidents", measured=f"not run: {reason}")
        return
    chosen = [each for each in INCIDENTS if not options.quick or each.name in QUICK]
    outcomes = []
    for outcome in outcomes_of(chosen):
        outcomes.append(outcome)
        yield outcome.row()
    right = sum(outcome.is_right for outcome in outcomes)
    yield Row(
        what="incidents with the right alert and no false one",
        measured=f"{right} of {len(outcomes)}",
        spread=f"waits scaled by 1/{1 / SCALE:.0f}",
        goal=f"{len(outcomes)}",
        met=right == len(outcomes),
    )


def outcomes_of(incidents: Sequence[Incident]) -> Iterator[Outcome]:
    """Plant incidents, some at the same time, and yield what each raised."""
    with tempfile.TemporaryDirectory(prefix="zerowatch-incidents-") as name, ExitStack() as undo:
        folder = Path(name)
        targets = folder / "targets.json"
        targets.write_text("[]")
        (folder / "servers").mkdir()
        monitoring = undo.enter_context(alerting(folder / "servers", Timing(SCALE), [targets]))
        number = 0
        for begin in range(0, len(incidents), RUNS_AT_ONCE):
            batch = incidents[begin : begin + RUNS_AT_ONCE]
            with ExitStack() as runs:
                started = []
                for incident in batch:
                    run = incident_run(incident.name, folder / incident.name, number, scale=SCALE)
                    started.append((incident, runs.enter_context(run)))
                    number += 1
                yield from _batch(monitoring.alerts, started, targets)


def _batch(
    history: AlertHistory, started: Sequence[tuple[Incident, IncidentRun]], targets: Path
) -> Iterator[Outcome]:
    """Let the runs train for a while, plant their incidents, and wait for the alerts."""
    runs = [run for _, run in started]

    def discover() -> None:
        listed = [target for run in runs for target in run.targets()]
        atomic_write(targets, json.dumps(listed))

    def look_until(condition: Callable[[], bool], seconds: float) -> bool:
        def look_once() -> bool:
            discover()
            return condition()

        return history.wait(look_once, seconds)

    if not look_until(lambda: all(run.is_training() for run in runs), STARTING_SECONDS):
        raise RuntimeError(f"no training: {[run.log(0)[-2000:] for run in runs]}")
    look_until(lambda: False, USUAL_SECONDS)
    planted: dict[str, float] = {}
    for incident, run in started:
        # A run that never trains has its incident from the start.
        history.poll()
        planted[incident.name] = time.monotonic()
        run.plant()

    def is_over(incident: Incident) -> bool:
        seconds = time.monotonic() - planted[incident.name]
        patience = max(PATIENCE_SECONDS, (incident.goal_seconds or 0) * SCALE * 1.5)
        spell = incident.alert and history.find(
            PREFIX + incident.alert, since=planted[incident.name], run=incident.name
        )
        if spell:
            return time.monotonic() - spell.seen > AFTERWARDS_SECONDS
        return seconds > patience

    look_until(lambda: all(is_over(incident) for incident, _ in started), 10 * PATIENCE_SECONDS)
    for incident, _ in started:
        spells = [
            spell
            for spell in history.spells
            if spell.labels.get("run") == incident.name and spell.labels["alertname"] not in ALWAYS
        ]
        yield Outcome(incident=incident, planted_at=planted[incident.name], spells=spells)


def names(spells: Sequence[Spell]) -> set[str]:
    """Return the names of alerts."""
    return {spell.labels["alertname"] for spell in spells}


def has_page(spell: Spell) -> bool:
    """Whether the runbook's page, to which the alert links, exists."""
    anchor = spell.annotations.get("runbook_url", "").partition("#")[2]
    headings = re.findall(r"^#+ (\S+)$", RUNBOOK.read_text(), re.MULTILINE)
    return anchor in {heading.lower() for heading in headings}
