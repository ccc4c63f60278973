"""Compares the tuner on a slow link with DeepSpeed's defaults and the best static settings.

First a static search, so that the ceiling is known; then a run is tuned in each of three spaces,
and what it found is compared with the start and the ceiling alternating, on the same engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.bench_options import Options
from bench.result_table import Row
from bench.tuner_link.link_figures import Tuned, fastest, seconds_of, short
from bench.tuner_link.search_space import SPACES, START, Configuration
from bench.tuner_link.two_host_jobs import Report, missing, on_link

RATE = "200mbit"
SHARE = 0.95
BEST = 5  # of each space that are measured again
SEARCH_FILE = Path(__file__).parents[3] / ".build" / "tuner_link_search.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Limits of what the tuner may change.

    Attributes:
        name: That of the part that the static search adds for it.
        goal: Least throughput, relative to that before.
        seconds: Time that the tuner has.
        arguments: Arguments of TrainingRun.
        settings: Settings of the tuner.
    """

    name: str
    goal: float
    seconds: float
    arguments: dict[str, str]
    settings: dict[str, Any]


def _space(name: str, goal: float, seconds: float, numerics: str, *, rebuild: bool) -> Space:
    return Space(
        name=name,
        goal=goal,
        seconds=seconds,
        arguments={"tuner": "auto", "numerics": numerics},
        settings={"rebuild": rebuild},
    )


TUNED = (
    _space("live knobs", 2.0, 190, "reassociation", rebuild=False),
    _space("rebuilds", 2.7, 460, "reassociation", rebuild=True),
    _space("statistical", 3.5, 460, "statistical", rebuild=True),
)


def bench(options: Options) -> Iterator[Row]:
    """Yield the search, and the tuned runs."""
    reason = missing()
    if reason is not None:
        print(f"no slow link: {reason}")
        return
    best: dict[str, Report] = {}
    for name, found in search(options).items():
        best[name] = found[0]
        yield Row(
            what=f"best static of {name}, {RATE}/s: {short(found[0]['configuration'])}",
            measured=f"{seconds_of(found[0]):.2f} s a step",
            spread="next: " + "; ".join(f"{seconds_of(one):.2f}" for one in found[1:]),
        )
    for space in TUNED:
        ceiling = best[space.name]["configuration"]
        yield from _rows(space, tuned(space, RATE, {"best static": ceiling}, options))


def search(options: Options) -> dict[str, list[Report]]:
    """Return the best of each space, which contains those before it; the fastest first."""
    parts = {name: part() for name, part in SPACES.items()}
    if options.quick:
        parts = {name: part[-2:] for name, part in parts.items()}
    first = visits([one for part in parts.values() for one in part], settle_steps=0, steps=1)
    shortlists: dict[str, list[Configuration]] = {}
    end = 0
    for name, part in parts.items():
        end += len(part)
        shortlists[name] = [one["configuration"] for one in fastest(first[:end])[:BEST]]
    again = [one for shortlist in shortlists.values() for one in shortlist]
    unique = [one for number, one in enumerate(again) if one not in again[:number]]
    unique.sort(key=lambda one: one["zero_stage"])
    second = visits(unique, settle_steps=1, steps=1 if options.quick else 4)
    SEARCH_FILE.parent.mkdir(exist_ok=True)
    SEARCH_FILE.write_text(json.dumps({"all, one step each": first, "the best again": second}))
    print(f"all that the search measured: {SEARCH_FILE}")
    return {
        name: fastest([one for one in second if one["configuration"] in shortlist])
        for name, shortlist in shortlists.items()
    }


def visits(
    configurations: Sequence[Configuration], *, settle_steps: int, steps: int
) -> list[Report]:
    """Walk through configurations on one live engine; the start comes first, and is dropped."""
    asked = {
        "visits": [START, START, *configurations],
        "settle_steps": settle_steps,
        "steps": steps,
    }
    return on_link(RATE, "tuner_link/static_search_job.py", asked, timeout_seconds=1500).reports[2:]


def tuned(
    space: Space,
    rate: str | None,
    rivals: dict[str, Configuration],
    options: Options,
    *,
    start: Configuration = START,
    seconds: float | None = None,
    rounds: int = 2,
    steps: int = 2,
) -> Tuned:
    """Tune a run for some seconds, by default those of its space, then compare the result."""
    seconds = space.seconds if seconds is None else seconds
    asked = {
        "tuner": space.arguments,
        "settings": space.settings,
        "seconds": 20 if options.quick else seconds,
        "rivals": {"start": start} | rivals,
        "rounds": rounds,
        "settle_steps": 1,
        "steps": steps,
        "micro_batch_samples": start["micro_batch_samples"],
        "stage": start["zero_stage"],
        "length": 32,
    }
    ended = on_link(rate, "tuner_link/tuned_link_job.py", asked, timeout_seconds=seconds + 600)
    for decision in ended.decisions:
        print(short_decision(decision), flush=True)
    return Tuned.read(ended.reports)


def short_decision(decision: Report) -> str:
    """Return a line about the tuner's decisions."""
    changes = ", ".join(
        f"{one['knob']} {one['before']} -> {one['after']}" for one in decision["changes"]
    )
    gain = "" if decision["gain"] is None else f", gain {decision['gain']:+.1%}"
    verdict, reason = decision["verdict"], decision["reason"]
    return f"after step {decision['step']}: {verdict} {changes}{gain} ({reason})"


def _rows(space: Space, run: Tuned) -> Iterator[Row]:
    what = f"{space.name}, {RATE}/s: "
    ratio, share = run.ratio("start"), run.ratio("best static")
    to_gain, explored = run.steps_to_gain(), run.exploration_seconds
    yield Row(
        what=what + "throughput after / before",
        measured=f"{ratio:.2f}: {run.seconds('start'):.2f} to {run.seconds('found'):.2f} s a step",
        spread=_spread(run.ratios("start")) + "; " + short(run.found),
        goal=f">= {space.goal:g}",
        met=ratio >= space.goal,
    )
    yield Row(
        what=what + "share of the best static",
        measured=f"{share:.0%}",
        spread=_spread(run.ratios("best static")),
        goal=f">= {SHARE:.0%}",
        met=share >= SHARE,
    )
    yield Row(
        what=what + "steps to 90 % of the gain",
        measured="not reached" if to_gain is None else str(to_gain),
        spread=f"of {len(run.steps)} in {run.all_seconds:.0f} s",
    )
    yield Row(
        what=what + "cost of exploring",
        measured=f"{explored:.1f} s, {explored / run.all_seconds:.1%}",
        spread=f"steps made by then / at the start's pace: {run.ratio_with_exploration:.2f}",
    )


def _spread(ratios: Sequence[float]) -> str:
    return " to ".join(f"{each:.2f}" for each in (min(ratios), max(ratios)))
