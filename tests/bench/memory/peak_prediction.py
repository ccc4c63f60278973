"""Measures the error of each step's predicted peak RSS in real training on CPU.

Three patterns of lengths, under glibc's default allocator and under one that gives memory back.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.bench_options import Options
from bench.result_table import Row
from scripts.memory.peaks import (
    DEFAULT_ALLOCATOR,
    GIVES_BACK,
    WARM_UP_STEPS,
    Job,
    median_and_p95,
    misses_on_longer,
    one_step_misses,
)

from zerowatch.runtime.memory.forecast.peak_readings import PeakPoint

PATTERNS = ("fixed", "sorted", "random")
STEPS, QUICK_STEPS = 120, 44
JOB_TIMEOUT_SECONDS = 900
GOAL = (0.02, 0.06)
# The error of a first version under the default allocator; the goal is less.
FIRST_TRIAL = 0.09


def bench(options: Options) -> Iterator[Row]:
    """Yield the errors by pattern and allocator, then those for lengths never seen before."""
    steps = QUICK_STEPS if options.quick else STEPS
    for pattern in PATTERNS:
        gives_back, default = _record(pattern, steps)
        yield _row(f"{pattern} lengths, memory given back", gives_back, *GOAL)
        yield _row(f"{pattern} lengths, default allocator", default, FIRST_TRIAL, None)
    gives_back, _ = _record("rising", steps)
    unseen = misses_on_longer(gives_back, times=2)
    middle, p95 = median_and_p95([miss.of_peak for miss in unseen])
    rise_middle, rise_p95 = median_and_p95([miss.of_rise for miss in unseen])
    yield Row(
        what="next peak, lengths twice as long as any seen",
        measured=f"{middle:.2%} median, {p95:.2%} p95",
        spread=f"of the rise {rise_middle:.1%}, {rise_p95:.1%}",
    )


def _record(pattern: str, steps: int) -> tuple[list[PeakPoint], list[PeakPoint]]:
    """Run two trainings at once: glibc returns freed memory in one, and keeps it in the other."""
    with tempfile.TemporaryDirectory(prefix="zerowatch-bench-") as name:
        jobs = [
            Job.start(Path(name) / f"{place}.jsonl", variables, pattern=pattern, steps=steps)
            for place, variables in enumerate((GIVES_BACK, DEFAULT_ALLOCATOR))
        ]
        gives_back, default = (job.points(JOB_TIMEOUT_SECONDS) for job in jobs)
    return gives_back, default


def _row(what: str, points: Sequence[PeakPoint], goal: float, p95_goal: float | None) -> Row:
    found = list(one_step_misses(points))
    middle, p95 = median_and_p95([miss.of_peak for miss in found])
    rise_middle, rise_p95 = median_and_p95([miss.of_rise for miss in found])
    naive_middle, naive_p95 = median_and_p95(_misses_of_the_last_peak(points))
    return Row(
        what=f"next peak, {what}",
        measured=f"{middle:.2%} median, {p95:.2%} p95",
        spread=(
            f"of the rise {rise_middle:.1%}, {rise_p95:.1%}; "
            f"by the peak before {naive_middle:.1%}, {naive_p95:.1%}"
        ),
        goal=f"{goal:.0%}" + (f", {p95_goal:.0%}" if p95_goal else " median"),
        met=middle < goal and (p95_goal is None or p95 < p95_goal),
    )


def _misses_of_the_last_peak(points: Sequence[PeakPoint]) -> list[float]:
    """Return the errors of the rule that predicts the previous peak."""
    late = points[WARM_UP_STEPS - 1 :]
    return [before.peak_bytes / after.peak_bytes - 1 for before, after in itertools.pairwise(late)]
