"""Conditions that keep alerts quiet where there is nothing to be alarmed about."""

from __future__ import annotations

from ...metrics.catalog import memory, training
from ...metrics.thresholds import STEPS_TO_JUDGE
from ..promql import IDENTITY, ON_GPU, by, select, where
from ..timing import Timing


def while_training(expression: str, *labels: str) -> str:
    """Keep the series of runs that are training, or with "rank" of ranks that are.

    A run that has ended leaves no samples behind but for those in the window of a rate.
    """
    return where(expression, f"{select(training.RUN_ACTIVE)} == 1", *labels)


def after_some_steps(expression: str, timing: Timing) -> str:
    """Keep what belongs to a run that has taken steps enough for a share of them to mean much."""
    steps = by("max", f"increase({select(training.STEPS)}[{timing.long}])")
    return where(expression, f"{steps} >= {STEPS_TO_JUDGE}")


def on_gpu(expression: str) -> str:
    """Keep the ranks that train on a GPU, whatever the device of the expression."""
    return where(expression, _GPU_MEMORY, "rank")


def not_on_gpu(expression: str) -> str:
    """Leave out the ranks that train on a GPU."""
    return f"{expression}\nunless on ({', '.join((*IDENTITY, 'rank'))}) {_GPU_MEMORY}"


_GPU_MEMORY = select(memory.MEMORY_BYTES, ON_GPU, 'state="allocated"')
