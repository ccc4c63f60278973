"""Lets other tuners choose the configuration, on the same slow link."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from bench.bench_options import Options
from bench.result_table import Row
from bench.tuner_link.deepspeed_autotuning import autotuning
from bench.tuner_link.link_figures import Tuned, short
from bench.tuner_link.search_space import START, live_knobs
from bench.tuner_link.slow_link import RATE
from bench.tuner_link.two_host_jobs import missing, on_link


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
    reports = on_link(RATE, "tuner_link/other_tuners_job.py", asked, timeout_seconds=1500).reports
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
