"""Conditions that prevent false alarms."""

from __future__ import annotations

from ...metrics.catalog import memory, training
from ...metrics.thresholds import STEPS_TO_JUDGE
from ..promql import IDENTITY, ON_GPU, by, select, where
from ..timing import Timing


def while_training(expression: str, *labels: str) -> str:
    """Keep the series of runs that are training, or with "rank" of ranks that are.

    A run that has ended leaves samples only within the range of a rate.
    """
    return where(expression, f"{select(training.RUN_ACTIVE)} == 1", *labels)


def after_some_steps(expression: str, timing: Timing) -> str:
    """Keep the series of runs that have taken enough steps to judge a share of their time."""
    steps = by("max", f"increase({select(training.STEPS)}[{timing.long}])")
    return where(expression, f"{steps} >= {STEPS_TO_JUDGE}")


def on_gpu(expression: str) -> str:
    """Keep the ranks that train on a GPU; the expression may be of another device."""
    return where(expression, _GPU_MEMORY, "rank")


def not_on_gpu(expression: str) -> str:
    """Leave out the ranks that train on a GPU."""
    return f"{expression}\nunless on ({', '.join((*IDENTITY, 'rank'))}) {_GPU_MEMORY}"


_GPU_MEMORY = select(memory.MEMORY_BYTES, ON_GPU, 'state="allocated"')
