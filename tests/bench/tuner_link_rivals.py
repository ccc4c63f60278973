"""Other tuners that choose the configuration, on the same slow link."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from options import Options
from table import Row
from tuner_link import RATE
from tuner_link_autotuning import autotuning
from tuner_link_found import Tuned, short
from tuner_link_hosts import missing, on_link
from tuner_link_space import START, live_knobs


def bench(options: Options) -> Iterator[Row]:
    """Yield DeepSpeed's own autotuner, and the best of 20 samples."""
    reason = missing()
    if reason is not None:
        print(f"no slow link: {reason}")
        return
    yield from _best_of_20(options)
    yield autotuning(RATE)


def _best_of_20(options: Options) -> Iterator[Row]:
    asked = {
        "space": live_knobs(),
        "start": START,
        "rivals": {"start": START},
        "rounds": 2,
        "steps": 1 if options.quick else 2,
    }
    reports = on_link(RATE, "tuner_link_rival_job.py", asked, timeout_seconds=1500).reports
    samples = [one for one in reports if "sample" in one]
    (end,) = (one for one in reports if "found" in one)
    run = Tuned.read(reports)
    exact = {str(one["configuration"]) for one in samples}
    yield Row(
        what=f"best of 20 samples, live knobs, {RATE}/s: throughput after / before",
        measured=f"{run.ratio('start'):.2f}: {run.seconds('found'):.2f} s a step",
        spread=f"its own score said {end['claimed_seconds']:.2f} s; {short(run.found)}",
    )
    seconds = [each for one in samples for each in one["all_seconds"]]
    lost = sum(max(0.0, each - run.seconds("start")) for each in seconds)
    yield Row(
        what="best of 20 samples: what it takes",
        measured=f"{len(seconds) + 3} steps, {sum(seconds):.0f} s, {len(exact)} configurations",
        spread=f"{lost:.0f} s slower than the start; slowest sample "
        f"{max(median(one['all_seconds']) for one in samples):.1f} s a step",
    )
