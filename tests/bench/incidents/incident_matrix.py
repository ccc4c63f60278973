"""Plants incidents in real training runs, and reports which alert fires first, and how soon.

    make bench ARGS=incidents
    make bench ARGS="incidents --only hang-in-a-collective,loss-nan"   # or --only hardware
    make bench ARGS="incidents --resume"                               # those without a result
    make bench ARGS="incidents --show"                                 # the table, without runs
    BENCH_SEPARATE=true make bench ARGS=incidents                      # with process.separate

Each incident has a run of its own: two ranks on two hosts (network and host name namespaces). One
real Prometheus and one real Alertmanager with the shipped rules watch all of them, and only
`RUNS_AT_ONCE` runs at the same time. No run starts while another is watched, because a start takes
all cores. Each outcome is kept at once in .build/incidents.jsonl.

Ranges and waits of the rules are multiplied by `SCALE`; so are the scrape interval and the timeout
of hangs: scrapes and evaluations once a second stand for one each 15 s. What the runs do
themselves, such as the comparison of ranks once a second, is not scaled, so that the times are too
long rather than too short. promtool tests the true waits (`tests/rules`).

A time is that until Alertmanager holds the alert, divided by `SCALE`, plus the time for which
Alertmanager waits before it sends the first message (`group_wait`). It is known to 15 s, because a
scrape, an evaluation and a look at Alertmanager are up to a second each.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.bench_options import Options
from bench.incidents import incident_results
from bench.incidents.incident_outcome import BY_NAME, LISTS, PREFIX, FiredAlert, Outcome
from bench.incidents.incident_run import PASSING, IncidentRun, incident_run
from bench.incidents.planted_incidents import Incident
from bench.result_table import Row
from lab.alerting import Monitoring, alerting
from lab.two_hosts import missing

from zerowatch.dashboards.timing import MINUTE, Timing
from zerowatch.metrics.atomic_file import atomic_write
from zerowatch.runtime.monitor.step_ring import recover

SCALE = 1 / 15
RUNS_AT_ONCE = 2  # of two ranks each, which mostly sleep
STARTING_SECONDS = 180.0
# Fires always, by design.
ALWAYS = {"ZerowatchWatchdog"}
QUICK = ("rank-killed", "loss-nan", "normal-end")
# Watched longer than the others, and therefore at the same time.
LONG = (
    "slow-rank",
    "slow-link",
    "disk-full",
    "skipped-steps",
    "data-starvation",
    "leak",
    "normal-end",
    "scrape-blocked-by-slow-clients",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """How long runs are watched, in seconds of real time.

    Attributes:
        usual: Before the incident. The alerts on numbers need 15 minutes; the rest is a margin.
        patience: Until the expected alert, or if none is expected.
        afterwards: For other alerts, after the expected one; and for its end.
    """

    usual: float = 18 * MINUTE
    patience: float = 45 * MINUTE
    afterwards: float = 5 * MINUTE


OF_TRAINING = Waits()
OF_HARDWARE = Waits(usual=6 * MINUTE, patience=30 * MINUTE)


def bench(options: Options) -> Iterator[Row]:
    """Plant the chosen incidents; yield a row for each, and how many raised the right alert."""
    try:
        done = incident_results.load()  # first: a result that cannot be kept would be lost
        chosen = selected(options.only or (QUICK if options.quick else tuple(LISTS)))
    except ValueError as error:
        sys.exit(str(error))
    if options.show:
        yield from table(done)
        return
    if (reason := missing()) is not None:
        yield Row(what="incidents", measured=f"not run: {reason}")
        return
    if options.resume:
        chosen = [each for each in chosen if each.name not in done or done[each.name].failure]
    elif not options.only:
        incident_results.put_aside()
    for name, members in LISTS.items():
        waits = OF_HARDWARE if name == "hardware" else OF_TRAINING
        for outcome in outcomes_of([each for each in chosen if each in members], waits):
            incident_results.keep(outcome)
            print(" | ".join(outcome.row().cells), flush=True)
    yield from table(incident_results.load())


def selected(names: Sequence[str]) -> list[Incident]:
    """Return the incidents with these names; the name of a list stands for all of its incidents.

    Raises:
        ValueError: A name is neither.
    """
    chosen: dict[str, Incident] = {}
    for name in names:
        if name not in LISTS and name not in BY_NAME:
            known = ", ".join((*LISTS, *BY_NAME))
            raise ValueError(f"no incident is called {name!r}; there are {known}")
        for incident in LISTS.get(name) or (BY_NAME[name],):
            chosen[incident.name] = incident
    return list(chosen.values())


def table(outcomes: Mapping[str, Outcome]) -> Iterator[Row]:
    """Yield a row for each kept outcome, and counts for each list."""
    for name, members in LISTS.items():
        kept = [outcomes[each.name] for each in members if each.name in outcomes]
        if not kept:
            continue
        yield from (outcome.row() for outcome in kept)
        factor = ", ".join(sorted({f"1/{1 / outcome.scale:.0f}" for outcome in kept}))
        load = max(outcome.load for outcome in kept)
        times = sorted(outcome.planted for outcome in kept)
        useful = [one for one in kept if one.is_useful]
        first = [one for one in useful if one.is_first]
        for what, right in (
            ("expected alert in time, with host and page, none false", useful),
            ("the same, and it was the first one", first),
        ):
            yield Row(
                what=f"{name}: {what}",
                measured=f"{len(right)} of {len(kept)}",
                spread=f"waits scaled by {factor}; load before a start up to {load:.1f}; "
                f"{times[0]} to {times[-1]}",
                goal=f"{len(members)}",
                met=len(right) == len(members),
            )


def outcomes_of(incidents: Sequence[Incident], waits: Waits) -> Iterator[Outcome]:
    """Plant incidents, some at the same time, and yield what each raised."""
    with ExitStack() as undo:
        lab = None
        for batch in batches(incidents):
            if any(each in LISTS["hardware"] for each in batch) and shutil.which("gcc") is None:
                yield from (_not_planted(each.name, "needs gcc") for each in batch)
                continue
            lab = lab or undo.enter_context(incident_lab())
            yield from lab.outcomes(batch, waits)


def batches(incidents: Sequence[Incident]) -> Iterator[Sequence[Incident]]:
    """Yield the incidents that happen at the same time, those that are watched long at the end."""
    order = {name: place for place, name in enumerate(LONG)}
    ordered = sorted(incidents, key=lambda each: order.get(each.name, -1))
    for begin in range(0, len(ordered), RUNS_AT_ONCE):
        yield ordered[begin : begin + RUNS_AT_ONCE]


@contextmanager
def incident_lab() -> Iterator[IncidentLab]:
    """Start the servers; end them, and remove all files."""
    with tempfile.TemporaryDirectory(prefix="zerowatch-incidents-") as name, ExitStack() as undo:
        folder = Path(name)
        undo.callback(recover, folder)  # deletes what killed ranks leave in /dev/shm
        targets = folder / "targets.json"
        targets.write_text("[]")
        (folder / "servers").mkdir()
        monitoring = undo.enter_context(alerting(folder / "servers", Timing(SCALE), targets))
        yield IncidentLab(monitoring, folder, targets)


class IncidentLab:
    """Runs that the servers watch.

    Args:
        monitoring: The servers.
        folder: For the files of the runs.
        targets: The file from which Prometheus reads its targets.
    """

    def __init__(self, monitoring: Monitoring, folder: Path, targets: Path) -> None:
        self._monitoring = monitoring
        self._folder = folder
        self._targets = targets
        self._num_runs = 0

    def outcomes(self, incidents: Sequence[Incident], waits: Waits) -> Iterator[Outcome]:
        """Let runs train for a while, plant their incidents, and wait for the alerts."""
        load = os.getloadavg()[0]
        with ExitStack() as undo:
            runs = [undo.enter_context(self._start(incident.name)) for incident in incidents]

            def are_settled() -> bool:
                settled = [run.is_ready() or run.failure() is not None for run in runs]
                return all(settled)

            self._look_until(runs, are_settled, STARTING_SECONDS)
            ready = [run for run in runs if run.failure() is None and run.is_ready()]
            for run in runs:
                if run not in ready:
                    failure = run.failure() or f"no engine after {STARTING_SECONDS:.0f} s"
                    yield replace(_not_planted(run.name, failure), load=load)
            if not ready:
                return
            self._look_until(ready, lambda: False, waits.usual * SCALE)
            planted = {run.name: (run.plant(), _now()) for run in ready}
            self._look_until(
                ready,
                lambda: all(self._is_over(run.name, planted[run.name][0], waits) for run in ready),
                10 * waits.patience * SCALE,
            )
            fired = {run.name: self._fired(run.name, planted[run.name][0]) for run in ready}
            ended = self._take_away(ready, waits)
            for run in ready:
                since, when = planted[run.name]
                later = self._fired(run.name, since)[len(fired[run.name]) :]
                yield Outcome(
                    name=run.name,
                    planted=when,
                    scale=SCALE,
                    load=load,
                    fired=fired[run.name],
                    after_end=sorted({each.name for each in later if each.was_heard}),
                    messages=self._monitoring.sent(run.name),
                    ended_seconds=ended.get(run.name),
                )

    @contextmanager
    def _start(self, name: str) -> Iterator[IncidentRun]:
        folder = self._folder / f"{self._num_runs}-{name}"
        with incident_run(name, folder, self._num_runs, scale=SCALE) as run:
            self._num_runs += 1
            yield run

    def _look_until(
        self, runs: Sequence[IncidentRun], condition: Callable[[], bool], seconds: float
    ) -> bool:
        """Wait; meanwhile write the targets of the runs, and record alerts."""

        def look_once() -> bool:
            listed = [target for run in runs for target in run.targets()]
            atomic_write(self._targets, json.dumps(listed))
            return condition()

        return self._monitoring.alerts.wait(look_once, seconds)

    def _is_over(self, name: str, since: float, waits: Waits) -> bool:
        """Whether the expected alert, and time for others, is over; or the patience."""
        incident, now = BY_NAME[name], time.monotonic()
        patience = max(waits.patience, 1.5 * (incident.goal_seconds or 0))
        spell = incident.alert and self._monitoring.alerts.find(
            PREFIX + incident.alert, since=since, run=name
        )
        if spell:
            return now - spell.seen > waits.afterwards * SCALE
        return now - since > patience * SCALE

    def _take_away(self, runs: Sequence[IncidentRun], waits: Waits) -> dict[str, float]:
        """End the incidents that can end; return the seconds until their alerts ended."""
        alerts = self._monitoring.alerts
        passing = [run for run in runs if run.name in PASSING]
        began = time.monotonic()
        for run in passing:
            run.take_away()

        def lasts(run: IncidentRun) -> bool:
            return alerts.lasts(f"{PREFIX}{BY_NAME[run.name].alert}", run=run.name)

        ended: dict[str, float] = {}

        def note_ends() -> bool:
            for run in passing:
                if run.name not in ended and not lasts(run):
                    ended[run.name] = time.monotonic() - began
            return len(ended) == len(passing)

        if passing:
            self._look_until(runs, note_ends, waits.afterwards * SCALE)
            # The receiver gets the message about an end after Alertmanager's group_interval.
            self._look_until(runs, lambda: False, 2 * MINUTE * SCALE)
        return ended

    def _fired(self, name: str, since: float) -> list[FiredAlert]:
        return [
            FiredAlert(
                labels=spell.labels,
                annotations=spell.annotations,
                seconds=spell.seen - since,
                lasted_seconds=None if spell.gone is None else spell.gone - spell.seen,
                was_heard=spell.was_heard,
            )
            for spell in self._monitoring.alerts.spells
            if spell.labels.get("run") == name and spell.labels["alertname"] not in ALWAYS
        ]


def _not_planted(name: str, failure: str) -> Outcome:
    return Outcome(name=name, planted=_now(), scale=SCALE, load=0.0, failure=failure)


def _now() -> str:
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
