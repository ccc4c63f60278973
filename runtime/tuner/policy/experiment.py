"""One proposal on trial against the configuration in use."""

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
    """What came of a proposal, and all that it was decided from.

    Attributes:
        verdict: What came of it.
        reason: Half a sentence for people.
        judgement: What was measured; None where it was not tried, or not to its end.
        plan: How it was to be measured; None where no trial was begun.
        times: Seconds per sample of each window of the trial in order, None where it said nothing.
        cost_seconds: What the trial took beyond training as before.
    """

    proposal: Proposal
    situation: TunerInput
    verdict: Verdict
    reason: str
    judgement: Judgement | None = None
    plan: TrialPlan | None = None
    times: Sequence[float | None] = field(default_factory=tuple)
    cost_seconds: float = 0.0

    @property
    def target(self) -> Configuration:
        """The whole of what was proposed."""
        return {**self.situation.configuration, **self.proposal.changes}


class Experiment:
    """Runs windows by turns with the configuration in use, A, and with the proposed one, B.

    Args:
        proposal: What differs in B.
        situation: What it was proposed from.
        plan: How it is measured.

    Attributes:
        cost_seconds: What it took so far beyond training as before, changes included.
    """

    def __init__(self, proposal: Proposal, situation: TunerInput, plan: TrialPlan) -> None:
        self.proposal, self.situation = proposal, situation
        self.cost_seconds = 0.0
        self._plan, self._trial = plan, Trial(plan)
        self._before: Configuration = situation.configuration
        self._after: Configuration = {**situation.configuration, **proposal.changes}
        self._num_off = 0  # windows of A in a row that took far more or less than usual
        self._times: list[float | None] = []

    @property
    def before(self) -> Configuration:
        """The whole of A."""
        return self._before

    @property
    def after(self) -> Configuration:
        """The whole of B."""
        return self._after

    @property
    def wanted(self) -> Configuration:
        """What the next window is to be run with."""
        return self._before if self._trial.arm == "A" else self._after

    @property
    def is_overtaken(self) -> bool:
        """Whether A itself has become another: the surroundings are no longer those of before."""
        return self._num_off >= SHIFTED_STEPS

    @property
    def has_begun(self) -> bool:
        """Whether a window was run for it."""
        return bool(self._times)

    @property
    def meets_next(self) -> bool:
        """Whether something may change after the next window."""
        return self._trial.meets_next

    @property
    def is_held_up(self) -> bool:
        """Whether it is interrupted so often that it would go on for ever."""
        return self._trial.is_held_up

    @property
    def judgement(self) -> Judgement | None:
        """What the trial came to; None while it goes on."""
        return self._trial.verdict

    def pause(self) -> None:
        """Let something else come between; the block under way is begun anew after it."""
        self._trial.pause()

    def add(self, step: StepTime, usual: Baseline | None) -> float:
        """Take the window that was run as wanted; return the seconds that it cost.

        Args:
            step: The window.
            usual: What steps took before the trial; None if not known.
        """
        time = step.seconds / step.samples if step.usable and step.samples else None
        is_of_a = self._trial.arm == "A" and not self._trial.is_settling
        if is_of_a and time is not None and usual is not None:
            self._num_off = self._num_off + 1 if usual.is_far_from(time) else 0
        cost = 0.0
        if self._trial.arm == "B" and usual is not None:
            cost = max(0.0, step.seconds - usual.seconds_per_sample * step.samples)
        self.cost_seconds += cost
        self._times.append(time)
        self._trial.add(time)
        return cost

    def dropped(self, reason: str, *, in_use: Configuration) -> Conclusion:
        """Return what came of it where it could not be made, or must not go on."""
        return self.concluded("rolled_back" if in_use == self._after else "rejected", reason)

    def concluded(self, verdict: Verdict, reason: str) -> Conclusion:
        """Return what came of it."""
        return Conclusion(
            proposal=self.proposal,
            situation=self.situation,
            verdict=verdict,
            reason=reason,
            judgement=self.judgement,
            plan=self._plan,
            times=tuple(self._times),
            cost_seconds=self.cost_seconds,
        )
