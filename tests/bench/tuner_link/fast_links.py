"""Runs the tuner on faster links, with little to gain; its result must not be slower."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.bench_options import Options
from bench.result_table import Row
from bench.tuner_link.link_figures import short
from bench.tuner_link.search_space import START, Configuration, at
from bench.tuner_link.slow_link import TUNED, tuned
from bench.tuner_link.two_host_jobs import missing

SECONDS = 100
LEAST = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A link (None is one without a limit), and the first configuration of a run on it."""

    what: str
    rate: str | None
    start: Configuration


CASES = (
    Case(what="1 Gbit/s", rate="1gbit", start=START),
    Case(what="not throttled", rate=None, start=START),
    Case(what="not throttled, from the best", rate=None, start=at(stage=0, micro_batch=16)),
)


def bench(options: Options) -> Iterator[Row]:
    """Yield what is left of the start's throughput, with everything allowed."""
    reason = missing()
    if reason is not None:
        print(f"no link: {reason}")
        return
    for case in CASES:
        yield from _rows(case, options)


def _rows(case: Case, options: Options) -> Iterator[Row]:
    widest = TUNED[-1]
    run = tuned(
        widest, case.rate, {}, options, start=case.start, seconds=SECONDS, rounds=6, steps=6
    )
    ratios = run.ratios("start")
    unchanged = all(run.found.get(knob, value) == value for knob, value in case.start.items())
    ratio = run.ratio("start")
    yield Row(
        what=f"{widest.name}, {case.what}: throughput after / before",
        measured=f"{ratio:.3f}" + (", nothing changed" if unchanged else ""),
        spread=f"{min(ratios):.2f} to {max(ratios):.2f}; {short(run.found)}",
        goal=f">= {LEAST}",
        met=unchanged or ratio >= LEAST,
    )
    yield Row(
        what=f"{widest.name}, {case.what}: cost of exploring",
        measured=f"{run.exploration_seconds:.1f} s of {run.all_seconds:.0f}",
        spread=f"steps made / at the start's pace: {run.ratio_with_exploration:.2f}",
    )
