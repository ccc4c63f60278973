"""Tries one proposal against the configuration in use, and decides when and how the trial ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .ab_comparison import AbComparison, TrialDesign, TrialResult
from .policy_types import Configuration, Proposal, StepTime, Verdict
from .proposals import TunerInput
from .step_time_observer import Baseline

SHIFTED_STEPS = 3  # consecutive outliers of A that show that the job itself has changed its speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The verdict on a proposal, with everything that it was derived from.

    Attributes:
        proposal: The proposal.
        inputs: What the proposal was derived from.
        verdict: The verdict.
        reason: Why, as half a sentence.
        result: Result of the trial. None if there was no trial, or if the trial was aborted.
        design: Design of the trial. None if no trial was started.
        times: Seconds per sample of each step of the trial in order. None for unusable steps.
        cost_seconds: Training time that the trial cost.
    """

    proposal: Proposal
    inputs: TunerInput
    verdict: Verdict
    reason: str
    result: TrialResult | None = None
    design: TrialDesign | None = None
    times: Sequence[float | None] = field(default_factory=tuple)
    cost_seconds: float = 0.0

    @property
    def target(self) -> Configuration:
        """The complete proposed configuration."""
        return {**self.inputs.configuration, **self.proposal.changes}


class Trial:
    """Runs steps alternately with the configuration in use, A, and the proposed one, B.

    Args:
        proposal: The difference between A and B.
        inputs: What the proposal was derived from.
        design: Design of the trial.

    Attributes:
        before: The complete configuration A.
        after: The complete configuration B.
        cost_seconds: Training time that the trial has cost so far, switches included.
    """

    def __init__(self, proposal: Proposal, inputs: TunerInput, design: TrialDesign) -> None:
        self.proposal, self.inputs = proposal, inputs
        self.before: Configuration = inputs.configuration
        self.after: Configuration = {**inputs.configuration, **proposal.changes}
        self.cost_seconds = 0.0
        self._design, self._comparison = design, AbComparison(design)
        self._num_outliers = 0  # consecutive steps of A
        self._times: list[float | None] = []

    @property
    def wanted(self) -> Configuration:
        """The configuration of the next step."""
        return self.before if self._comparison.variant == "A" else self.after

    @property
    def is_invalidated(self) -> bool:
        """Whether A itself has changed its speed, so that the context has changed."""
        return self._num_outliers >= SHIFTED_STEPS

    @property
    def has_started(self) -> bool:
        """Whether a step of the trial was run."""
        return bool(self._times)

    @property
    def needs_exchange(self) -> bool:
        """Whether the configuration may change after the next step."""
        return self._comparison.may_end_block

    @property
    def is_stalled(self) -> bool:
        """Whether the trial is interrupted too often to come to a result."""
        return self._comparison.is_stalled

    @property
    def result(self) -> TrialResult | None:
        """The result; None while the trial runs."""
        return self._comparison.result

    def pause(self) -> None:
        """Discard the current block, because the trial is interrupted, e.g. by a checkpoint."""
        self._comparison.pause()

    def add(self, step: StepTime, baseline: Baseline | None) -> float:
        """Add a step that was run with the wanted configuration. Return the seconds that it cost.

        Args:
            step: The step.
            baseline: Step times before the trial; None if unknown.
        """
        comparison = self._comparison
        time = step.seconds / step.samples if step.usable and step.samples else None
        is_settled_a = comparison.variant == "A" and not comparison.is_settling
        if is_settled_a and time is not None and baseline is not None:
            self._num_outliers = self._num_outliers + 1 if baseline.is_outlier(time) else 0
        cost = 0.0
        if comparison.variant == "B" and baseline is not None:
            cost = max(0.0, step.seconds - baseline.seconds_per_sample * step.samples)
        self.cost_seconds += cost
        self._times.append(time)
        comparison.add(time)
        return cost

    def abort_decision(self, reason: str, *, in_use: Configuration) -> Decision:
        """Return the decision on a proposal that could not be set, or whose trial must end.

        Args:
            reason: Why, as half a sentence.
            in_use: The configuration in use. If the proposed configuration is in use, it has to be
                rolled back.
        """
        return self.decision("rolled_back" if in_use == self.after else "rejected", reason)

    def decision(self, verdict: Verdict, reason: str) -> Decision:
        """Return the decision with that verdict."""
        return Decision(
            proposal=self.proposal,
            inputs=self.inputs,
            verdict=verdict,
            reason=reason,
            result=self.result,
            design=self._design,
            times=tuple(self._times),
            cost_seconds=self.cost_seconds,
        )
