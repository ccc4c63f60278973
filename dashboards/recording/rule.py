"""What a recording rule is, and the usual ways to make one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...metrics.catalog import training
from ...metrics.catalog.spec import MetricSpec
from ..promql import by, rate, ratio, recorded_name, select
from ..timing import Timing

# What a step takes, evaluation and checkpoints left out: ratios divide by it.
TRAINING_PHASES = 'phase!~"eval|checkpoint"'


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRule:
    """A name for an expression.

    Attributes:
        name: level:metric:operations.
        expression: Returns the PromQL for a timing's ranges.
        labels: The labels of the result, besides job.
    """

    name: str
    expression: Callable[[Timing], str]
    labels: tuple[str, ...]

    def select(self, *matchers: str) -> str:
        """Write an instant selector of what is recorded."""
        return f"{self.name}{{{', '.join(matchers)}}}" if matchers else self.name


def recorded(
    spec: MetricSpec, operation: str, expression: Callable[[Timing], str], *labels: str
) -> RecordingRule:
    """Make a rule that keeps run and `labels`; the level in its name is made of them."""
    return RecordingRule(
        name=recorded_name("_".join(("run", *labels)), spec, operation),
        expression=expression,
        labels=("run", *labels),
    )


def aggregated(spec: MetricSpec, operation: str, *labels: str, matcher: str = "") -> RecordingRule:
    """Aggregate a gauge over ranks, or over what else is not named."""
    matchers = (matcher,) if matcher else ()
    return recorded(
        spec, operation, lambda timing: by(operation, select(spec, *matchers), *labels), *labels
    )


def summed_rate(spec: MetricSpec, *labels: str, part: str = "") -> RecordingRule:
    """Add up a counter's rate."""
    named = recorded_name("_".join(("run", *labels)), spec, "rate5m")
    if part:
        named = named.replace(spec.name, spec.name + part)
    return RecordingRule(
        name=named,
        expression=lambda timing: by("sum", rate(spec, timing.short, part=part), *labels),
        labels=("run", *labels),
    )


def share_of_training(
    spec: MetricSpec, time_range: str, *labels: str, per: tuple[str, ...] = ()
) -> str:
    """Write the share of training time that a counter of seconds takes, by `per` and `labels`."""
    whole = by("sum", rate(training.PHASE_SECONDS, time_range, TRAINING_PHASES), *per)
    return ratio(by("sum", rate(spec, time_range), *per, *labels), whole, *per)
