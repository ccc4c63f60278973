"""Adds PromQL conditions that prevent false alarms to the expressions of alerts."""

from __future__ import annotations

from ...metrics.catalog import memory, training
from ...metrics.thresholds import STEPS_TO_JUDGE
from ..promql import IDENTITY, ON_GPU, by, earlier, select, where
from ..recording_rules import RecordingRule
from ..timing import Timing


def while_training(expression: str, *labels: str) -> str:
    """Return `expression` restricted to runs that are training now.

    Otherwise an alert could fire after the end of a run, because a rate still has samples for the
    length of its range. With the label "rank", restrict it to ranks that are training now.
    """
    return where(expression, f"{select(training.RUN_ACTIVE)} == 1", *labels)


def after_some_steps(expression: str, timing: Timing) -> str:
    """Return `expression` restricted to runs with at least 10 steps, one of them lately.

    During the first steps a run warms up, and shares of its time mean little. The steps are counted
    from the start, so that a run with steps of some minutes is judged as well.
    """
    begun = where(expression, f"{by('max', select(training.STEPS))} >= {STEPS_TO_JUDGE}")
    return where(begun, f"{steps_taken(timing.long)} > 0")


def after_new_step(expression: str, time_range: str) -> str:
    """Return `expression` restricted to runs that have taken a step within the range.

    A gauge of a step, such as the loss, keeps its value during an evaluation. The single value of
    the step before would count as lasting. With a range of at most the time that an alert waits, a
    single value never raises it.
    """
    steps = select(training.STEPS)
    return where(expression, f"{by('max', steps)} != {by('max', earlier(steps, time_range))}")


def steps_taken(time_range: str) -> str:
    """Return the number of steps that each run has taken within a range."""
    return by("max", f"increase({select(training.STEPS)}[{time_range}])")


def after_some_time(expression: str, rule: RecordingRule, age: str) -> str:
    """Return `expression` restricted to runs in which `rule` had a value already `age` ago.

    A comparison with what is usual in a run needs a past.
    """
    return where(expression, f"{rule.select()} offset {age}")


def on_gpu(expression: str) -> str:
    """Return `expression` restricted to ranks that train on a GPU.

    The expression itself may be about another device, such as the host.
    """
    return where(expression, _GPU_MEMORY, "rank")


def not_on_gpu(expression: str) -> str:
    """Return `expression` restricted to ranks that do not train on a GPU."""
    return f"{expression}\nunless on ({', '.join((*IDENTITY, 'rank'))}) {_GPU_MEMORY}"


_GPU_MEMORY = select(memory.MEMORY_BYTES, ON_GPU, 'state="allocated"')
