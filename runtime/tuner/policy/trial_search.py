"""Selects which proposals to try, and whether their trials are worth the cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from .ab_comparison import TrialDesign, design_trial
from .controller_interface import TunerOptions
from .diagnose import MEMORY_PRESSURE, diagnose
from .knob_registry import SPECS
from .metrics_delta import MetricsDelta
from .policy_types import Configuration, JobFacts, KnobSetter, Proposal, StepTime, Symptom, Value
from .proposals import TunerInput, propose
from .search_history import SearchHistory
from .step_time_observer import Baseline
from .trial import Decision, Trial

UNPREDICTED_GAIN = 0.03  # assumed gain of a change without a prediction
MAX_RELAXED_LOSS = 0.02  # loss of speed that may result from undoing an unneeded measure
ASSUMED_LOSS = 0.15  # loss of speed that is assumed for the windows of a trial in advance
# Training time that counts as spent before the first step. Trials at the start are worth most,
# because their gains pay for the longest time.
GRANT_SECONDS = 600.0


class ExplorationBudget:
    """Limits the cost of trials to a ratio of the training time so far, plus a grant.

    Args:
        ratio: Seconds that trials may cost, per second of training.
        grant_seconds: Training time that is added to the time so far.

    Attributes:
        spent_seconds: Training time spent so far.
    """

    def __init__(self, ratio: float, *, grant_seconds: float = GRANT_SECONDS) -> None:
        self.spent_seconds = 0.0
        self._ratio = ratio
        self._grant_seconds = grant_seconds
        self._elapsed_seconds = 0.0

    @property
    def left_seconds(self) -> float:
        """Seconds that may still be spent. Negative if trials cost more than expected."""
        allowed = self._ratio * (self._elapsed_seconds + self._grant_seconds)
        return allowed - self.spent_seconds

    def elapse(self, seconds: float) -> None:
        """Add training time, inside or outside of a trial."""
        self._elapsed_seconds += seconds

    def spend(self, seconds: float) -> None:
        """Charge a pause, or the extra time of a step on trial. Negative values are ignored."""
        self.spent_seconds += max(0.0, seconds)

    def allows(self, expected_cost_seconds: float) -> bool:
        """Whether a trial with this expected cost is within the budget."""
        return expected_cost_seconds <= self.left_seconds


def pays_back(expected_gain: float, remaining_seconds: float | None, cost_seconds: float) -> bool:
    """Whether a gain of throughput is expected to save more time than its trial costs.

    Args:
        expected_gain: Gain of throughput, 0.5 for half as much again.
        remaining_seconds: Training time left at the present speed. None if unknown, which counts
            as infinite.
        cost_seconds: Training time that the trial costs.
    """
    remaining = inf if remaining_seconds is None else remaining_seconds - cost_seconds
    return expected_gain > 0 and remaining * expected_gain / (1 + expected_gain) > cost_seconds


class TrialSearch:
    """Derives trials from metrics: diagnosis, proposals, and whether a trial pays.

    Args:
        knobs: Knobs of rank 0, which are read but not set.
        facts: Properties of the job.
        options: Limits that the user sets.
        history: History of the search so far.

    Attributes:
        budget: Training time that trials may cost.
        num_fruitless: Trials so far without an accepted change.
        rebuild_seconds: Duration of the last rebuild; 0 before the first.
    """

    def __init__(
        self,
        knobs: KnobSetter,
        facts: JobFacts,
        options: TunerOptions,
        history: SearchHistory,
    ) -> None:
        self.budget = ExplorationBudget(options.exploration_ratio)
        self.num_fruitless = 0
        self.rebuild_seconds = 0.0
        self._advised: list[Configuration] = []
        # Under memory pressure, a value may be slower. Only values that failed are excluded.
        self._failed: set[tuple[str, Value]] = set()
        self._knobs, self._facts, self._options, self._history = knobs, facts, options, history

    def inputs(
        self, reading: MetricsDelta, step: StepTime, configuration: Configuration
    ) -> TunerInput:
        """Return the input of proposals after an interval of training.

        Args:
            reading: Metrics of the interval.
            step: The last window of the interval.
            configuration: The configuration of that window.
        """
        if not reading.stale:
            self._history.enter_context(reading, configuration)
        symptoms = diagnose(reading, self._options.thresholds)
        return self._inputs(reading, symptoms, step, configuration)

    def emergency_inputs(self, step: StepTime, configuration: Configuration) -> TunerInput:
        """Return the input of proposals where some rank is about to run out of memory."""
        risk = step.oom_risk or 0.0
        symptom = Symptom(name=MEMORY_PRESSURE, ratio=risk, evidence={"oom_risk_ratio": risk})
        reading = MetricsDelta(oom_risk=risk)
        inputs = self._inputs(reading, (symptom,), step, configuration)
        return replace(inputs, excluded=frozenset(self._failed))

    def memory_savings(self, inputs: TunerInput) -> Iterator[Trial]:
        """Yield changes that free memory and that this rank supports. They do not need a trial."""
        for proposal in propose(inputs):
            trial = Trial(proposal, inputs, self._design(proposal, 1.0))
            if self._knobs.unsupported_reason(trial.after) is None:
                yield trial

    def proposals_to_advise(self, inputs: TunerInput) -> Iterator[Trial]:
        """Yield the first proposal that this rank supports, unless it was advised before."""
        for proposal in propose(inputs):
            trial = Trial(proposal, inputs, self._design(proposal, 1.0))
            if self._knobs.unsupported_reason(trial.after) is None:
                if proposal.changes not in self._advised:
                    self._advised.append(proposal.changes)
                    yield trial
                return

    def trials(
        self, inputs: TunerInput, step: StepTime, baseline: Baseline
    ) -> Iterator[tuple[Trial, str | None]]:
        """Yield what to try, the most promising first, each with why this rank refuses it.

        Args:
            inputs: Inputs of the proposals.
            step: The last window.
            baseline: Present step times.
        """
        step_seconds = baseline.seconds_per_sample * step.samples
        self._history.check_other_runs()
        now = replace(inputs, excluded=self._history.excluded, remembered=self._history.best)
        for proposal in propose(now):
            if proposal.symptom.name == MEMORY_PRESSURE:  # applied without a trial, once necessary
                continue
            design = self._design(proposal, step_seconds, baseline)
            if self._is_worth_it(proposal, design, step_seconds, step.number):
                trial = Trial(proposal, inputs, design)
                yield trial, self._knobs.unsupported_reason(trial.after)

    def on_switched(self, before: Configuration, after: Configuration, seconds: float) -> None:
        """Record the duration of a switch between two configurations."""
        self.budget.spend(seconds)
        changed = (knob for knob, value in after.items() if before.get(knob, value) != value)
        if any(knob in SPECS and SPECS[knob].apply_mode == "rebuild" for knob in changed):
            self.rebuild_seconds = seconds

    def on_failed(self, changes: Configuration, *, refused: bool) -> None:
        """Record that a change could not be made. If it has several knobs, the first is blamed.

        If a rank refused the change, for example for lack of memory, a later run may try it again.
        """
        if refused:
            self._history.mark_failed(changes)
        else:
            self._history.reject(changes)
        self._failed.add(next(iter(changes.items())))

    def on_accepted(self, decision: Decision, configuration: Configuration) -> None:
        """Record that a proposal was accepted, which resulted in this configuration."""
        before, changes = decision.inputs.configuration, decision.proposal.changes
        old = {knob: before[knob] for knob in changes if knob in before}
        if decision.result is not None:
            self._history.accept(configuration, instead_of=old)
        else:  # not compared with the configuration before
            self._history.on_memory_saving(old)

    def _inputs(
        self,
        reading: MetricsDelta,
        symptoms: tuple[Symptom, ...],
        step: StepTime,
        configuration: Configuration,
    ) -> TunerInput:
        return TunerInput(
            configuration=configuration,
            options=self._knobs.options(),
            facts=self._facts,
            numerics=self._options.numerics,
            allows_rebuild=self._options.allows_rebuild,
            symptoms=symptoms,
            reading=reading,
            samples_per_rank=-(-step.samples // self._facts.world_size),
            excluded=self._history.excluded,
            remembered=self._history.best,
            context=self._history.context,
            thresholds=self._options.thresholds,
        )

    def _design(
        self, proposal: Proposal, step_seconds: float, baseline: Baseline | None = None
    ) -> TrialDesign:
        design = design_trial(
            step_seconds,
            number=self.num_fruitless + 1,
            apply_mode=proposal.apply_mode,
            settle_steps=max(SPECS[knob].settle_steps for knob in proposal.changes),
        )
        min_gain = max(design.min_gain, self._options.min_gain)
        if proposal.relaxes:
            min_gain = -2 * MAX_RELAXED_LOSS  # a trial asks the lower bound for half of it
        if baseline is None:
            return replace(design, min_gain=min_gain)
        recent = tuple(baseline.recent[-design.block_steps :])
        return replace(
            design,
            min_gain=min_gain,
            noise=baseline.noise,
            initial_a_block=recent if len(recent) == design.block_steps else (),
        )

    def _is_worth_it(
        self, proposal: Proposal, design: TrialDesign, step_seconds: float, number: int
    ) -> bool:
        """Whether the budget allows the assumed cost of a trial, and a gain pays it back."""
        num_windows = 2 * (design.block_steps + design.settle_steps)
        cost = ASSUMED_LOSS * num_windows * step_seconds
        if proposal.apply_mode == "rebuild":
            cost += 2 * self.rebuild_seconds  # there, and possibly back
        remaining: float | None = None
        if self._options.total_steps is not None:
            left = self._options.total_steps - number
            if left <= num_windows:  # too few for a verdict
                return False
            remaining = left * step_seconds
        gain = proposal.predicted_gain or UNPREDICTED_GAIN
        is_free = proposal.relaxes and proposal.apply_mode == "live"
        return (is_free or pays_back(gain, remaining, cost)) and self.budget.allows(cost)
