"""Runs the tuner's state machine on rank 0: decides what to change, and whether a change stays.

The controller does not change any knob itself. After each step, it updates two properties.
`needs_exchange` is true if the ranks have to exchange a switch request after the next step, and
`configuration` holds that request. The controller has no other input than its arguments and the
metrics that it reads.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from .configuration_state import ConfigurationState, PendingAccept
from .controller_interface import WARMUP_STEPS, TunerListener, TunerOptions
from .diagnose import exposed_ratio
from .metrics_delta import MetricsDelta
from .policy_types import (
    Configuration,
    JobFacts,
    KnobSetter,
    Numerics,
    Proposal,
    State,
    StepTime,
    SwitchRequest,
    SwitchResult,
)
from .proposals import TunerInput
from .search_history import SearchHistory
from .step_time_observer import NORMAL, MetricsSource, StepTimeObserver
from .trial import Decision, Trial
from .trial_search import TrialSearch

logger = logging.getLogger(__name__)

SETTLE_STEPS = 2  # steps that are not measured after a rollback
MAX_FAILURES = 2  # number of failed changes after which the tuner enters safe mode
# Steps until another memory saving is considered. The risk is unknown until the forecast has
# readings of steps after the last one.
MEMORY_FREED_STEPS = 5

# The states that may follow each state. An accepted memory saving does not need a trial, so ACCEPT
# may also follow WARMUP, OBSERVE and COOLDOWN.
TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.WARMUP: frozenset({State.OBSERVE, State.ACCEPT}),
    State.OBSERVE: frozenset({State.PROPOSE, State.ACCEPT, State.SAFE_MODE, State.FROZEN}),
    State.PROPOSE: frozenset({State.PREFLIGHT, State.OBSERVE}),
    State.PREFLIGHT: frozenset({State.APPLIED, State.ROLLBACK, State.OBSERVE}),
    State.APPLIED: frozenset({State.TRIAL, State.ROLLBACK, State.OBSERVE}),
    State.TRIAL: frozenset({State.ACCEPT, State.ROLLBACK, State.OBSERVE}),
    State.ACCEPT: frozenset({State.COOLDOWN}),
    State.ROLLBACK: frozenset({State.OBSERVE}),
    State.COOLDOWN: frozenset({State.OBSERVE, State.ACCEPT}),
    State.SAFE_MODE: frozenset({State.FROZEN}),
    State.FROZEN: frozenset({State.OBSERVE, State.SAFE_MODE}),
}
_INACTIVE = (State.FROZEN, State.SAFE_MODE)  # states in which nothing is tried


class Controller:
    """Diagnoses one run, starts trials, and decides by their results. Exists on rank 0 only.

    Args:
        knobs: Knobs of rank 0, which are read but not set.
        metrics: Metrics of rank 0.
        facts: Properties of the job.
        options: Limits that the user sets.
        listener: Receives the events.
        history: History of earlier runs of this job.

    Attributes:
        configuration: The configurations that are in use, wanted, and known to be good.
        state: One of the keys of TRANSITIONS.
    """

    def __init__(
        self,
        knobs: KnobSetter,
        metrics: MetricsSource,
        facts: JobFacts,
        options: TunerOptions,
        listener: TunerListener,
        history: SearchHistory | None = None,
    ) -> None:
        self._options, self._listener = options, listener
        self._history = history or SearchHistory()
        self._search = TrialSearch(knobs, facts, options, self._history)
        self._observer = StepTimeObserver(
            metrics, options.diagnosis_interval_seconds, options.exchange_seconds
        )
        self._emergency_savings = EmergencySavings(self._search, options)
        self._loss_guard = LossGuard()
        self.configuration = ConfigurationState(knobs, listener)
        self._trial: Trial | None = None
        self._pending_accept = PendingAccept(self.configuration, self._search, listener)
        # Decisions against changes are reported once no rank uses these changes any more.
        self._unreported: list[Decision] = []
        # The inputs of the last proposals. More proposals may follow from the same inputs.
        self._inputs: TunerInput | None = None
        # Observations that ended without a diagnosis since the last one, and their training time.
        self._num_discarded, self._observed_seconds = 0, 0.0
        self._num_failures, self._step_seconds = 0, 1.0
        self._num_settling = 0  # steps to skip
        self._num_idle = WARMUP_STEPS  # steps until something is tried
        self.state = State.WARMUP
        listener.on_state(self.state)

    @property
    def accepts_batches(self) -> bool:
        """Whether steps may be passed late and in batches, because nothing is on trial."""
        return self._trial is None and self.configuration.is_settled

    @property
    def needs_exchange(self) -> bool:
        """Whether all ranks have to exchange a switch request after the next step."""
        trial = self._trial
        return not self.configuration.is_settled or (trial is not None and trial.needs_exchange)

    def on_switched(self, request: SwitchRequest, result: SwitchResult) -> None:
        """Handle the result of a switch request."""
        self._search.on_switched(self.configuration.in_use, request.target, result.seconds)
        if self._trial is not None:
            self._trial.cost_seconds += result.seconds
        if result.done:
            self.configuration.on_applied(request.target)
            if self._trial is not None and not self.configuration.is_on_trial:
                self._history.on_trial_end()  # the trial is paused
            if self.state is State.PREFLIGHT:
                self._enter(State.APPLIED)
            self._complete_accept()
            self._report_undone()
            return
        self.configuration.wanted = self.configuration.in_use
        if not result.undone or not request.checked:
            self._keep_what_is_left(result)
        elif self._trial is not None:
            self._abort_trial(f"it could not be set: {result.reason}", failed=not result.refused)
        else:
            self._pending_accept.fail(result.reason, refused=result.refused)

    def on_window_end(self, step: StepTime) -> None:
        """Handle a committed step, which is one window."""
        self._search.budget.elapse(step.seconds)
        self._step_seconds = step.seconds
        if step.replays:
            self._on_out_of_memory(step)
        if self.state is not State.FROZEN and self._emergency_savings.is_due(step):
            self._free_memory(step)
        elif self._trial is not None:
            self._continue_trial(self._trial, step)
        elif self.configuration.is_settled:
            self._loss_guard.add(step.loss)
            self._observe(step)

    def on_window_failed(self) -> None:
        """Handle a step that ended with an error. A configuration on trial is rolled back."""
        if self.configuration.is_on_trial:
            self._abort_trial("a window with it ended by an error")
        self._keep_external()

    def pause_trial(self) -> SwitchRequest | None:
        """Return the switch that interrupts a trial for now, e.g. for a checkpoint."""
        if self._trial is not None:
            self._trial.pause()
        # If an accepted configuration is pending, the switch sets that configuration instead.
        if not self._pending_accept.is_pending:
            self.configuration.wanted = self.configuration.known_good
        return self.configuration.pending_switch()

    def on_user_change(self) -> None:
        """Treat the present values of the knobs as known to be good, because the user set them."""
        self._interrupt_trial("the script changed a setting")
        self.configuration.reset()
        self._report_undone()
        self._restart_observation()

    def freeze(self) -> None:
        """Roll back the configuration on trial, and do not try anything until `thaw`."""
        if self.state is not State.FROZEN:
            self._interrupt_trial("the stop file exists")
            self._enter(State.FROZEN)

    def thaw(self) -> None:
        """Continue after `freeze`, with a new diagnosis."""
        if self.state is State.FROZEN:
            has_failed = self._num_failures >= MAX_FAILURES
            self._enter(State.SAFE_MODE if has_failed else State.OBSERVE)
            self._restart_observation()

    def close(self) -> None:
        """Record that the run ends normally, so that the trial does not count as crashed."""
        self._interrupt_trial("the run ended")
        self._report_all()

    def _enter(self, state: State) -> None:
        if state is self.state:
            return
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"the tuner cannot go from {self.state} to {state}")
        self.state = state
        self._listener.on_state(state)

    def _restart_observation(self) -> None:
        """Discard all observations. Observe the job again, unless the state is inactive."""
        self._inputs = None
        self._observer.reset()
        if self.state not in _INACTIVE:
            self._enter(State.OBSERVE)

    def _on_speed_shift(self, speed: str) -> None:
        """Search again, because step times have changed."""
        if self.state is not State.SAFE_MODE:
            self._history.on_speed_shift(speed)
        self._num_idle = 0
        self._restart_observation()

    def _observe(self, step: StepTime) -> None:
        """Handle a step with nothing on trial."""
        if self._num_settling:
            self._num_settling -= step.usable
            return
        self._num_idle = max(0, self._num_idle - 1)
        reading = self._observer.add(step)
        is_observing = self.state is State.OBSERVE and self._inputs is None
        self._observed_seconds += step.seconds if is_observing else 0.0
        if self._observer.shift is not None:
            if is_observing:
                self._num_discarded += 1
                self._listener.on_observation_discarded(self._num_discarded, self._observed_seconds)
            self._on_speed_shift(self._observer.shift)
        elif self._num_idle or self.state in _INACTIVE:
            return
        elif self.state is not State.OBSERVE:  # warm-up or cooldown is over
            self._restart_observation()
        elif self._inputs is not None:  # the last trial did not change anything
            self._try_next(self._inputs, step)
        elif reading is not None:
            self._diagnose(reading, step)

    def _diagnose(self, reading: MetricsDelta, step: StepTime) -> None:
        self._num_discarded, self._observed_seconds = 0, 0.0
        inputs = self._search.inputs(reading, step, self.configuration.known_good)
        is_known = exposed_ratio(reading, self._options.thresholds) is not None
        self._listener.on_diagnosis(inputs.symptoms, reading.seconds if is_known else None)
        if not self._options.acts:
            for trial in self._search.proposals_to_advise(inputs):
                self._listener.on_decision(trial.decision("advised", trial.proposal.reason))
        elif not inputs.is_memory_short:  # otherwise EmergencySavings acts
            self._try_next(inputs, step)

    def _try_next(self, inputs: TunerInput, step: StepTime) -> None:
        """Start a trial of the most promising proposal that this rank does not refuse."""
        baseline = self._observer.baseline
        if baseline is None:
            return
        self._enter(State.PROPOSE)
        for trial, reason in self._search.trials(inputs, step, baseline):
            self._enter(State.PROPOSE)  # again, because a refused trial has left this state
            self._enter(State.PREFLIGHT)
            self._trial = trial
            if reason is None:
                self._history.on_trial_start(trial.proposal.changes)
                self._listener.on_trial(trial.proposal, trial.before)
                self.configuration.request(trial.wanted, trial.proposal.reason)
                return
            self._abort_trial(reason)
        self._inputs = None
        self._enter(State.OBSERVE)

    def _continue_trial(self, trial: Trial, step: StepTime) -> None:
        """Handle a step of a trial."""
        self._history.on_trial_step()
        if trial.is_stalled:
            self._abort_trial("too few consecutive windows could be measured")
        elif self.configuration.in_use != trial.wanted:  # the trial was paused
            self._history.on_trial_resume(trial.proposal.changes)
            self.configuration.wanted = trial.wanted
        else:
            self._search.budget.spend(trial.add(step, self._observer.baseline))
            self._judge(trial, step)

    def _judge(self, trial: Trial, step: StepTime) -> None:
        problem = self._loss_guard.check(trial.proposal, step)
        if problem is not None and self.configuration.is_on_trial:
            self._abort_trial(problem, failed=True)
        elif trial.is_invalidated:
            self._interrupt_trial("training changed its speed without the change")
            self._on_speed_shift("other")
        else:
            if self.state is State.APPLIED:
                self._enter(State.TRIAL)
            self.configuration.wanted, result = trial.wanted, trial.result
            if result is not None:
                end = self._accept if result.verdict == "accepted" else self._reject
                end(trial.decision(result.verdict, result.reason))

    def _on_out_of_memory(self, step: StepTime) -> None:
        """Roll back a change that ran out of memory. Keep what the recovery has changed."""
        if self._trial is not None and self.configuration.is_on_trial:
            self._search.budget.spend(self._trial.add(step, self._observer.baseline))
            self._abort_trial("memory ran out", failed=True)
        self._keep_external()

    def _keep_external(self) -> None:
        """Keep what others changed, and end a trial, whose steps were run without it."""
        is_on_trial = self.configuration.is_on_trial
        replaced = self.configuration.adopt_external()
        if replaced is None:
            return
        if not is_on_trial:  # otherwise the trial may be to blame
            self._history.on_memory_saving(replaced)
        self._interrupt_trial("the out-of-memory recovery changed a setting")
        self._report_undone()
        self._restart_observation()

    def _abort_trial(self, reason: str, *, failed: bool = False) -> None:
        """End a trial that could not be started or must not continue."""
        if self._trial is None:
            return
        decision = self._trial.abort_decision(reason, in_use=self.configuration.in_use)
        if failed:
            self._reject(decision)
        else:
            self._history.mark_failed(decision.proposal.changes)
            self._roll_back(decision)
        self._num_failures += failed
        if self._num_failures >= MAX_FAILURES:
            self._enter_safe_mode(f"{self._num_failures} changes failed, the last one: {reason}")

    def _reject(self, decision: Decision) -> None:
        """End a trial with a verdict against its change. The verdict is saved in the history."""
        self._history.reject(decision.proposal.changes)
        self._roll_back(decision)

    def _roll_back(self, decision: Decision) -> None:
        self._enter(State.ROLLBACK)
        self._discard_trial()
        self._inputs = decision.inputs
        self._unreported.append(decision)
        self._report_undone()

    def _interrupt_trial(self, reason: str) -> None:
        """End the trial without a verdict. Its change may be tried again.

        Args:
            reason: Why, as half a sentence.
        """
        trial = self._trial
        self._discard_trial()
        if trial is not None:
            self._unreported.append(trial.decision("interrupted", reason))
            self._report_undone()

    def _report_undone(self) -> None:
        """Report the decisions against changes, once no rank uses these changes any more."""
        if self.configuration.is_settled:
            self._report_all()

    def _report_all(self) -> None:
        decisions, self._unreported = self._unreported, []
        for decision in decisions:
            self._listener.on_decision(decision)

    def _keep_what_is_left(self, result: SwitchResult) -> None:
        """Keep a configuration that could not be undone, report it, and enter safe mode."""
        trial, good = self._trial, self.configuration.known_good
        pending = self._pending_accept.drain()
        kept = [*self._unreported, *([] if pending is None else [pending])]
        if trial is not None:
            self._history.reject(trial.proposal.changes)
            kept.append(trial.decision("not_undone", ""))
        self._trial, self._unreported = None, []
        self.configuration.commit()
        in_use = self.configuration.in_use
        changed = [each for each in in_use if each not in good or good[each] != in_use[each]]
        own = ", ".join(f"{each}={json.dumps(in_use[each])}" for each in changed)
        left = (
            "; ".join(filter(None, (own, result.remaining_changes))) or "an unknown configuration"
        )
        outcome = f"training continues with {left} ({result.reason})"
        for decision in kept:
            reason = (
                f"{decision.reason}; {outcome}" if decision.verdict == "rolled_back" else outcome
            )
            self._listener.on_decision(replace(decision, verdict="not_undone", reason=reason))
        self._enter_safe_mode(outcome)

    def _discard_trial(self) -> None:
        """End the trial without a report."""
        self._observer.interrupt()
        self._history.on_trial_end()
        self._search.num_fruitless += self._trial is not None and self._trial.has_started
        self._pending_accept.abandon()
        self._trial = self._inputs = None
        self.configuration.wanted = self.configuration.known_good
        self._num_settling = SETTLE_STEPS
        if self.state not in _INACTIVE:
            self._enter(State.OBSERVE)

    def _accept(self, decision: Decision) -> None:
        """Commit a configuration as soon as all ranks use it."""
        self._trial = None
        self._pending_accept.start(decision)
        self._complete_accept()

    def _complete_accept(self) -> None:
        if not self._pending_accept.complete():
            return
        self._num_idle = self._options.cooldown(self._step_seconds)
        self._observer.reset()
        if self.state is not State.SAFE_MODE:
            self._enter(State.ACCEPT)
            self._enter(State.COOLDOWN)

    def _free_memory(self, step: StepTime) -> None:
        """Act on a risk of running out of memory.

        If a change is on trial, about to be set or about to be undone, it is rolled back. A memory
        saving is applied only if the risk is high again later.
        """
        if self._trial is not None or not self.configuration.is_settled:
            reason = f"the risk of running out of memory is {step.oom_risk or 0.0:.0%}"
            if self.state in (State.APPLIED, State.TRIAL):  # the change may be the cause
                self._abort_trial(reason)
            self._interrupt_trial(reason)
            return
        decision = self._emergency_savings.find(step, self.configuration.known_good)
        if decision is not None:
            self._accept(decision)

    def _enter_safe_mode(self, reason: str) -> None:
        """Stop all trials in this run. Only a risk of running out of memory is still handled."""
        self._interrupt_trial(reason)
        logger.warning("tuner in safe mode, nothing more is tried in this run: %s", reason)
        self._num_failures = MAX_FAILURES
        if self.state is not State.FROZEN:
            self._enter(State.SAFE_MODE)


class EmergencySavings:
    """Selects changes that free memory before it runs out. These changes do not need a trial.

    Args:
        search: Finds possible changes.
        options: Limits that the user sets.
    """

    def __init__(self, search: TrialSearch, options: TunerOptions) -> None:
        self._search, self._options = search, options
        self._num_waiting = 0

    def is_due(self, step: StepTime) -> bool:
        """Whether a step shows a high risk of running out of memory, and the tuner may act."""
        self._num_waiting = max(0, self._num_waiting - 1)
        is_due = self._options.acts and not self._num_waiting and step.is_risky
        if is_due:
            self._num_waiting = MEMORY_FREED_STEPS
        return is_due

    def find(self, step: StepTime, configuration: Configuration) -> Decision | None:
        """Return the decision to apply a change; None if no change is left.

        Args:
            step: Time and risk of the step that shows the risk.
            configuration: The configuration of that step.
        """
        inputs = self._search.emergency_inputs(step, configuration)
        trial = next(self._search.memory_savings(inputs), None)
        if trial is None:
            logger.warning(
                "OOM risk is %.0f %%, and no memory saving is left to apply",
                100 * (step.oom_risk or 0.0),
            )
            self._num_waiting = self._options.cooldown_steps
            return None
        reason = f"the risk of running out of memory was {step.oom_risk or 0.0:.0%}"
        return trial.decision("accepted", reason)


class LossGuard:
    """Detects a loss far above its recent range, which a change of rounding may cause."""

    MAX_LOSSES = 50  # number of recent steps whose losses are the recent range
    MIN_LOSSES = 10  # with fewer losses, nothing is detected
    MAX_DEVIATIONS = 6.0  # standard deviations above the median that are still accepted
    # Minimum standard deviation, as a share of the loss. Without this minimum, any change of a
    # constant loss would be an outlier.
    MIN_SPREAD = 0.01

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=self.MAX_LOSSES)

    def add(self, loss: float | None) -> None:
        """Add the loss of a step without a trial."""
        if loss is not None:
            self._losses.append(loss)

    def check(self, proposal: Proposal, step: StepTime) -> str | None:
        """Return why a change must be rolled back after a step; None if it may stay."""
        if proposal.numerics >= Numerics.STATISTICAL and self._is_too_high(step.loss):
            return f"the loss went up to {step.loss:.4g}"
        return None

    def _is_too_high(self, loss: float | None) -> bool:
        if loss is None or len(self._losses) < self.MIN_LOSSES:
            return False
        middle = median(self._losses)
        spread = NORMAL * median(abs(each - middle) for each in self._losses)
        return loss - middle > self.MAX_DEVIATIONS * max(spread, self.MIN_SPREAD * abs(middle))
