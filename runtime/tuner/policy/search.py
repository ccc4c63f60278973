"""Finds what to try next, and whether trying it is worth its price."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from .budget import ExplorationBudget, pays_back
from .diagnose import MEMORY_PRESSURE, diagnose
from .experiment import Conclusion, Experiment
from .metrics_delta import MetricsDelta
from .numerics import JobFacts
from .options import TunerOptions
from .proposals import TunerInput, propose
from .registry import SPECS
from .search_history import SearchHistory
from .step_time_observer import Baseline
from .trial_plan import TrialPlan, plan_trial
from .types import Configuration, KnobSetter, Proposal, StepTime, Symptom, Value

UNPREDICTED_GAIN = 0.03  # what a change is hoped to bring of which nothing is foretold
MOST_RELAXED_LOSS = 0.02  # that training may be slower without what is no longer needed
FEARED_LOSS = 0.15  # of the windows run with it, what a change may cost before it is taken back


class Search:
    """Makes experiments of what the metrics say.

    Args:
        hands: Rank 0's; asked only.
        facts: Returns those of the job.
        rules: The user's.
        known: What was found out so far.

    Attributes:
        budget: Of what trials may cost.
        num_fruitless: Trials so far that accepted nothing.
        rebuild_seconds: What another engine takes, as far as is known.
    """

    def __init__(
        self,
        hands: KnobSetter,
        facts: Callable[[], JobFacts],
        rules: TunerOptions,
        known: SearchHistory,
    ) -> None:
        self.budget = ExplorationBudget(rules.exploration_ratio)
        self.num_fruitless = 0
        self.rebuild_seconds = 0.0
        self._said: list[Configuration] = []
        # In an emergency it is no reason that a value was slower; only that it could not be set.
        self._failed: set[tuple[str, Value]] = set()
        self._hands, self._facts, self._rules, self._known = hands, facts, rules, known

    def situation(
        self, reading: MetricsDelta, step: StepTime, configuration: Configuration
    ) -> TunerInput:
        """Return what a stretch of training says of the job.

        Args:
            reading: Of the stretch.
            step: Its last window.
            configuration: What it was run with.
        """
        if not reading.stale:
            self._known.look_around(reading, configuration)
        symptoms = diagnose(reading, self._rules.thresholds)
        return self._of(reading, symptoms, step, configuration)

    def emergency(self, step: StepTime, configuration: Configuration) -> TunerInput:
        """Return the situation of a job some rank of which is about to run out of memory."""
        symptom = Symptom(
            name=MEMORY_PRESSURE, ratio=step.oom_risk, evidence={"oom_risk_ratio": step.oom_risk}
        )
        reading = MetricsDelta(oom_risk=step.oom_risk)
        found = self._of(reading, (symptom,), step, configuration)
        return replace(found, denied=frozenset(self._failed))

    def reliefs(self, situation: TunerInput) -> Iterator[Experiment]:
        """Yield what would give memory back, and is possible here; it is not tried, but done."""
        for proposal in propose(situation):
            experiment = Experiment(proposal, situation, self._plan(proposal, 1.0))
            if self._hands.unsupported_reason(experiment.after) is None:
                yield experiment

    def advice(self, situation: TunerInput) -> Iterator[Experiment]:
        """Yield what would be tried first, if that was not said before and is possible here."""
        for proposal in propose(situation):
            experiment = Experiment(proposal, situation, self._plan(proposal, 1.0))
            if self._hands.unsupported_reason(experiment.after) is None:
                if proposal.changes not in self._said:
                    self._said.append(proposal.changes)
                    yield experiment
                return

    def experiments(
        self, situation: TunerInput, step: StepTime, usual: Baseline
    ) -> Iterator[tuple[Experiment, str | None]]:
        """Yield what to try, the most promising first, with why this rank would not.

        Args:
            situation: Of the job.
            step: The last window.
            usual: What steps take now.
        """
        step_seconds = usual.seconds_per_sample * step.samples
        now = replace(situation, denied=self._known.denied, remembered=self._known.best)
        for proposal in propose(now):
            plan = self._plan(proposal, step_seconds, usual)
            if self._is_worth_it(proposal, plan, step_seconds, step.number):
                experiment = Experiment(proposal, situation, plan)
                yield experiment, self._hands.unsupported_reason(experiment.after)

    def switched(self, before: Configuration, after: Configuration, seconds: float) -> None:
        """Take what it took to go from one configuration to another."""
        self.budget.spend(seconds)
        changed = (knob for knob, value in after.items() if before.get(knob, value) != value)
        if any(knob in SPECS and SPECS[knob].tier == "rebuild" for knob in changed):
            self.rebuild_seconds = seconds

    def failed(self, changes: Configuration) -> None:
        """Take it that a change could not be made; of several knobs the first is at it."""
        self._known.reject(changes)
        self._failed.add(next(iter(changes.items())))

    def adopted(self, conclusion: Conclusion, configuration: Configuration) -> None:
        """Take it that a proposal was adopted, and is a part of this configuration."""
        before, changes = conclusion.situation.configuration, conclusion.proposal.changes
        old = {knob: before[knob] for knob in changes if knob in before}
        if conclusion.judgement is not None:
            self._known.found(configuration, instead_of=old)
        else:  # it was not compared with what was before
            self._known.gave_up(old)

    def _of(
        self,
        reading: MetricsDelta,
        symptoms: tuple[Symptom, ...],
        step: StepTime,
        configuration: Configuration,
    ) -> TunerInput:
        return TunerInput(
            configuration=configuration,
            options=self._hands.options(),
            facts=self._facts(),
            numerics=self._rules.numerics,
            allows_rebuild=self._rules.allows_rebuild,
            symptoms=symptoms,
            reading=reading,
            samples_per_rank=-(-step.samples // self._facts().world_size),
            denied=self._known.denied,
            remembered=self._known.best,
            context=self._known.context,
            thresholds=self._rules.thresholds,
        )

    def _plan(
        self, proposal: Proposal, step_seconds: float, usual: Baseline | None = None
    ) -> TrialPlan:
        plan = plan_trial(
            step_seconds,
            number=self.num_fruitless + 1,
            tier=proposal.tier,
            settle_steps=max(SPECS[knob].settle_steps for knob in proposal.changes),
        )
        least = max(plan.min_gain, self._rules.min_gain)
        if proposal.relaxes:
            least = -2 * MOST_RELAXED_LOSS  # a trial asks the lower bound for half of it
        if usual is None:
            return replace(plan, min_gain=least)
        lead = tuple(usual.lead[-plan.block_steps :])
        is_block = len(lead) == plan.block_steps
        return replace(plan, min_gain=least, noise=usual.noise, lead=lead if is_block else ())

    def _is_worth_it(
        self, proposal: Proposal, plan: TrialPlan, step_seconds: float, number: int
    ) -> bool:
        """Whether what a trial is feared to cost may be spent, and comes back."""
        num_windows = 2 * (plan.block_steps + plan.settle_steps)
        cost = FEARED_LOSS * num_windows * step_seconds
        if proposal.tier == "rebuild":
            cost += 2 * self.rebuild_seconds  # there, and maybe back
        remaining: float | None = None
        if self._rules.total_steps is not None:
            left = self._rules.total_steps - number
            if left <= num_windows:  # it would not come to a verdict
                return False
            remaining = left * step_seconds
        gain = proposal.predicted_gain or UNPREDICTED_GAIN
        is_free = proposal.relaxes and proposal.tier == "live"
        return (is_free or pays_back(gain, remaining, cost)) and self.budget.allows(cost)


def is_short_of_memory(situation: TunerInput) -> bool:
    """Whether trials lack room; what is done about it waits for a risk, as `MemoryRelief`."""
    return situation.symptom(MEMORY_PRESSURE) is not None
