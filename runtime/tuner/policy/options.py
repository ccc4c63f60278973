"""What the user lets the tuner do, and who is told of what it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .diagnose import Thresholds
from .experiment import Conclusion
from .metrics_delta import MetricsDelta
from .types import Configuration, Numerics, Proposal, Symptom

LEAST_SOAK_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerOptions:
    """What the user lets the tuner do.

    Attributes:
        numerics: What may happen to the numbers.
        acts: Whether it changes anything, or only says what it would change.
        allows_rebuild: Whether the engine may be rebuilt.
        min_gain: Least gain of throughput worth a change.
        exploration_ratio: Most of the training time that trials may cost.
        soak_steps: Steps after an accepted change in which nothing else is tried.
        soak_seconds: And seconds; the shorter of both holds.
        observe_seconds: Of training that a diagnosis is made from.
        total_steps: That the training will have; None if not known.
        thresholds: From when on something is a symptom.
    """

    numerics: Numerics
    acts: bool = True
    allows_rebuild: bool = True
    min_gain: float = 0.01
    exploration_ratio: float = 0.05
    soak_steps: int = 200
    soak_seconds: float = 10.0
    observe_seconds: float = 20.0
    total_steps: int | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)

    def soak(self, step_seconds: float) -> int:
        """Return how many windows of that length nothing else is tried for."""
        steps = round(self.soak_seconds / max(step_seconds, 1e-9))
        return min(self.soak_steps, max(LEAST_SOAK_STEPS, steps))


class TunerListener(Protocol):
    """Who is told."""

    def state(self, name: str) -> None:
        """Take the state that the tuner is in now, one of TUNER_STATES."""

    def configured(self, configuration: Configuration) -> None:
        """Take what the job works with now."""

    def diagnosed(self, symptoms: Sequence[Symptom], reading: MetricsDelta, /) -> None:
        """Take what was found."""

    def tries(self, proposal: Proposal, configuration: Configuration) -> None:
        """Take what goes on trial, and what the job works with else."""

    def concluded(self, conclusion: Conclusion) -> None:
        """Take what came of a proposal."""
