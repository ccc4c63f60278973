"""Measures how soon a rank that skips a collective is named, in twenty jobs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench.bench_options import Options
from bench.result_table import Row
from scripts.cross_rank.run_skip_job import Trial

GOAL_SECONDS = 15.0
TRIALS = 20
CALLS_OF_THE_SCRIPT = 4


def bench(options: Options) -> Iterator[Row]:
    """Yield how many of the ranks that skipped a collective were named, and how late."""
    trials = 2 if options.quick else TRIALS
    right, seconds = 0, []
    for number in range(trials):
        rank, call, step = number % 2, number // 2 % CALLS_OF_THE_SCRIPT, 4 + number
        with tempfile.TemporaryDirectory() as folder:
            trial = Trial(Path(folder), rank, call, step, patience_seconds=2 * GOAL_SECONDS)
        right += trial.named == rank
        seconds.append(trial.seconds)
    yield Row(
        what="skipped collective: right rank named",
        measured=f"{right} of {trials}",
        goal=f"{trials}",
        met=right == trials,
    )
    yield Row(
        what="skipped collective: seconds until named, worst",
        measured=f"{max(seconds):.1f} s",
        spread=f"median {median(seconds):.1f} s",
        goal=f"{GOAL_SECONDS:.0f} s",
        met=max(seconds) < GOAL_SECONDS,
    )
