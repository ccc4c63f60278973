"""Compares estimated memory with the memory of real engines on two ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from bench.bench_options import Options
from bench.result_table import Row
from scripts.estimator.estimate_cases import CASES, SHAPES, WITH_ACTIVATIONS
from scripts.estimator.run_estimate_job import Compared, compare, compare_activations

GOAL_STATES, GOAL_ACTIVATIONS = 0.05, 0.10
CASES_PER_JOB = 4  # so that a job ends before its timeout


def bench(options: Options) -> Iterator[Row]:
    """Yield a row for each configuration and each micro-batch, and the medians."""
    model = "small" if options.quick else "large"
    states = _compare(list(CASES), model)
    yield from (_row(f"states: {one.name}", one) for one in states)
    yield _median("states: median of the errors", states, GOAL_STATES)
    yield _median("states: median of the errors against RSS", _by_rss(states), GOAL_STATES)
    together = _compare(list(WITH_ACTIVATIONS), model)
    yield from (_row(f"with activations: {one.name}", one) for one in together)
    yield _median("with activations: median of the errors", together, GOAL_ACTIVATIONS)
    with tempfile.TemporaryDirectory() as folder:
        pairs = list(compare_activations(list(SHAPES), Path(folder)))
    for traced, formula in pairs:
        yield _row(f"activations, traced: {traced.name}", traced)
        yield _row(f"activations, by formula: {formula.name}", formula)
    worst = [max(pair, key=lambda one: abs(one.error)) for pair in pairs]
    yield _median("activations: median of the larger errors", worst, GOAL_ACTIVATIONS)


def _compare(names: Sequence[str], model: str) -> list[Compared]:
    compared: list[Compared] = []
    for first in range(0, len(names), CASES_PER_JOB):
        with tempfile.TemporaryDirectory() as folder:
            compared += compare(names[first : first + CASES_PER_JOB], model, Path(folder))
    return compared


def _by_rss(compared: Sequence[Compared]) -> list[Compared]:
    """Replace the measurement by RSS: with gloo's copies, without untouched memory."""
    return [replace(one, measured=one.rss) for one in compared]


def _row(what: str, one: Compared) -> Row:
    return Row(
        what=what,
        measured=f"{one.measured / 1e6:.1f} MB",
        spread=(
            f"planned {one.estimated / 1e6:.1f} MB, {one.error:+.1%}; RSS {one.rss / 1e6:.1f} MB"
        ),
    )


def _median(what: str, compared: Sequence[Compared], goal: float) -> Row:
    errors = [abs(one.error) for one in compared]
    return Row(
        what=what,
        measured=f"{median(errors):.2%}",
        spread=f"worst {max(errors):.2%}",
        goal=f"{goal:.0%}",
        met=median(errors) < goal,
    )
