"""Measures how soon a report names a stopped rank, with the default settings."""

from __future__ import annotations

import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench.bench_options import Options
from bench.result_table import Row
from scripts.cross_rank.run_hang_job import running

GOAL_SECONDS = 45.0
TRIALS = 3
TRAINING_SECONDS = 6.0  # a rank gives its first sign of life after a second
STOPPED = 1
NAMES_THE_STOPPED = re.compile(rf"rank {STOPPED} has not arrived at ")


def bench(options: Options) -> Iterator[Row]:
    """Yield how many of the stopped ranks were named, and how late."""
    trials = 1 if options.quick else TRIALS
    named, seconds = [], []
    for _ in range(trials):
        with tempfile.TemporaryDirectory() as folder:
            was_named, after = _trial(Path(folder) / "job")
        named.append(was_named)
        seconds.append(after)
    yield Row(
        what="stopped rank: named by the report",
        measured=f"{sum(named)} of {trials}",
        goal=f"{trials}",
        met=all(named),
    )
    yield Row(
        what="stopped rank: seconds until reported, worst",
        measured=f"{max(seconds):.1f} s",
        spread=f"median {median(seconds):.1f} s",
        goal=f"{GOAL_SECONDS:.0f} s",
        met=max(seconds) < GOAL_SECONDS,
    )


def _trial(folder: Path) -> tuple[bool, float]:
    """Stop a rank; return whether it was named, and the seconds until the report was there."""
    with running(folder) as job:
        job.wait_for_steps(20)
        time.sleep(TRAINING_SECONDS)
        job.signal_rank(STOPPED, signal.SIGSTOP)
        stopped_at = time.monotonic()
        job.wait_for_report(0)
        seconds = time.monotonic() - stopped_at
        verdict = job.report(0).read_text().partition("\n")[0]
    return NAMES_THE_STOPPED.match(verdict) is not None, seconds
