"""One proposal on trial against the configuration in use, and what it came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .proposals import TunerInput
from .step_time_observer import Baseline
from .trial import Judgement, Trial
from .trial_plan import TrialPlan
from .types import Configuration, Proposal, StepTime, Verdict

SHIFTED_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """The end of a proposal, with everything it was decided from.

    Attributes:
        proposal: The proposal.
        inputs: Inputs of the proposal.
        verdict: The verdict.
        reason: Half a sentence for people.
        judgement: Result of the trial; None without a trial, or where it was aborted.
        plan: The trial's; None where no trial was started.
        times: Seconds per sample of each window of the trial in order; None for unusable ones.
        cost_seconds: Training time that the trial cost.
    """

    proposal: Proposal
    inputs: TunerInput
    verdict: Verdict
    reason: str
    judgement: Judgement | None = None
    plan: TrialPlan | None = None
    times: Sequence[float | None] = field(default_factory=tuple)
    cost_seconds: float = 0.0

    @property
    def target(self) -> Configuration:
        """The complete proposed configuration."""
        return {**self.inputs.configuration, **self.proposal.changes}


class Experiment:
    """Runs windows alternately with the configuration in use, A, and the proposed one, B.

    Args:
        proposal: The difference between A and B.
        inputs: Inputs of the proposal.
        plan: Plan of the trial.

    Attributes:
        before: The complete configuration A.
        after: The complete configuration B.
        cost_seconds: Training time that the trial has cost so far, switches included.
    """

    def __init__(self, proposal: Proposal, inputs: TunerInput, plan: TrialPlan) -> None:
        self.proposal, self.inputs = proposal, inputs
        self.before: Configuration = inputs.configuration
        self.after: Configuration = {**inputs.configuration, **proposal.changes}
        self.cost_seconds = 0.0
        self._plan, self._trial = plan, Trial(plan)
        self._num_outliers = 0  # consecutive windows of A
        self._times: list[float | None] = []

    @property
    def wanted(self) -> Configuration:
        """The configuration of the next window."""
        return self.before if self._trial.arm == "A" else self.after

    @property
    def is_invalidated(self) -> bool:
        """Whether A itself has changed its speed, so that the context is another one."""
        return self._num_outliers >= SHIFTED_STEPS

    @property
    def has_started(self) -> bool:
        """Whether a window was run for it."""
        return bool(self._times)

    @property
    def needs_exchange(self) -> bool:
        """Whether the configuration may change after the next window."""
        return self._trial.may_end_block

    @property
    def is_stalled(self) -> bool:
        """Whether it is interrupted too often to come to a verdict."""
        return self._trial.is_stalled

    @property
    def judgement(self) -> Judgement | None:
        """The result of the trial; None while it runs."""
        return self._trial.verdict

    def pause(self) -> None:
        """Discard the current block, because something else comes in between."""
        self._trial.pause()

    def add(self, step: StepTime, baseline: Baseline | None) -> float:
        """Add a window that was run as wanted; return the seconds that it cost.

        Args:
            step: The window.
            baseline: Step times before the trial; None if unknown.
        """
        time = step.seconds / step.samples if step.usable and step.samples else None
        is_settled_a = self._trial.arm == "A" and not self._trial.is_settling
        if is_settled_a and time is not None and baseline is not None:
            self._num_outliers = self._num_outliers + 1 if baseline.is_outlier(time) else 0
        cost = 0.0
        if self._trial.arm == "B" and baseline is not None:
            cost = max(0.0, step.seconds - baseline.seconds_per_sample * step.samples)
        self.cost_seconds += cost
        self._times.append(time)
        self._trial.add(time)
        return cost

    def aborted(self, reason: str, *, in_use: Configuration) -> Conclusion:
        """Return the conclusion where it could not be set, or must not continue."""
        return self.concluded("rolled_back" if in_use == self.after else "rejected", reason)

    def concluded(self, verdict: Verdict, reason: str) -> Conclusion:
        """Return the conclusion with that verdict."""
        return Conclusion(
            proposal=self.proposal,
            inputs=self.inputs,
            verdict=verdict,
            reason=reason,
            judgement=self.judgement,
            plan=self._plan,
            times=tuple(self._times),
            cost_seconds=self.cost_seconds,
        )
