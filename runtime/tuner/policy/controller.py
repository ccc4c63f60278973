"""Decides what to change, and whether it stays: a machine of states that rank 0 runs.

It never acts. It is told how each window went, and says whether the ranks are to meet after the
next one, and what all are to work with then. Pure but for the snapshots it asks for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ....metrics.snapshot import Snapshot
from .configuration_state import ConfigurationState
from .experiment import Conclusion, Experiment
from .loss_guard import LossGuard
from .memory_relief import MemoryRelief
from .metrics_delta import MetricsDelta
from .numerics import JobFacts
from .options import TunerListener, TunerOptions
from .pending_accept import PendingAccept
from .proposals import TunerInput
from .search import Search, is_short_of_memory
from .search_history import SearchHistory
from .step_time_observer import StepTimeObserver
from .types import KnobSetter, Order, Outcome, StepTime

logger = logging.getLogger(__name__)

WARMUP_STEPS = 5
SETTLE_STEPS = 2  # after a change that did not stay
MOST_FAILURES = 2  # changes that could not be made or ran out of memory; after that, hands off
OFF = ("frozen", "safe_mode")  # states in which nothing is tried


class Controller:
    """One for a run, on rank 0.

    Args:
        hands: Rank 0's; asked, and never used to change anything.
        snapshot: Copies rank 0's metrics.
        facts: Returns those of the job.
        rules: The user's.
        listener: Who is told.
        known: What earlier runs of this job found out.

    Attributes:
        course: What the job works with, and is to work with.
        state: One of TUNER_STATES.
    """

    def __init__(
        self,
        hands: KnobSetter,
        snapshot: Callable[[], Snapshot],
        facts: Callable[[], JobFacts],
        rules: TunerOptions,
        listener: TunerListener,
        known: SearchHistory | None = None,
    ) -> None:
        self._rules, self._listener, self._known = rules, listener, known or SearchHistory()
        self._search = Search(hands, facts, rules, self._known)
        self._observer = StepTimeObserver(snapshot, rules.observe_seconds)
        self._relief = MemoryRelief(self._search, rules)
        self._sentinel, self.course = LossGuard(), ConfigurationState(hands, listener.configured)
        self._experiment: Experiment | None = None
        self._adoption = PendingAccept(self.course, self._search, listener)
        self._situation: TunerInput | None = None  # from which more may be tried
        self._num_failures, self._step_seconds = 0, 1.0
        self._quiet, self._rest = 0, WARMUP_STEPS  # windows: of no use; until anything is done
        self.state = ""
        self._enter("warmup")

    @property
    def is_calm(self) -> bool:
        """Whether windows may be told of some time later, several at once."""
        return self._experiment is None and self.course.is_there

    @property
    def meets_next(self) -> bool:
        """Whether all ranks are to meet after the next window."""
        experiment = self._experiment
        return not self.course.is_there or (experiment is not None and experiment.meets_next)

    def carried_out(self, order: Order, outcome: Outcome) -> None:
        """Take how an order ended."""
        self._search.switched(self.course.in_use, order.target, outcome.seconds)
        if self._experiment is not None:
            self._experiment.cost_seconds += outcome.seconds
        if outcome.done:
            self.course.arrive(order.target)
            if self.state == "preflight":
                self._enter("applied")
            self._adopt_if_in_use()
            return
        self.course.wanted = self.course.in_use
        if self._experiment is not None:
            self._drop(f"it could not be set: {outcome.reason}", failed=not outcome.refused)
        else:
            self._adoption.fail(outcome.reason)
        if not outcome.undone or not order.checked:
            self._make_safe(outcome.reason)
            self.course.stay()

    def window_ended(self, step: StepTime) -> None:
        """Take a committed window."""
        self._search.budget.elapse(step.seconds)
        self._step_seconds = step.seconds
        if step.replays:
            self.course.follow()  # what was given up for memory stays given up
        if self.state != "frozen" and self._relief.is_due(step):
            self._relieve(step)
        elif self._experiment is not None:
            self._go_on(self._experiment, step)
        elif self.course.is_there:
            self._sentinel.learn(step.loss)
            self._look(step)

    def window_failed(self) -> None:
        """Take a window that ended by an error; what was on trial in it is taken back."""
        if self.course.is_on_trial:
            self._drop("a window with it ended by an error")
        self.course.follow()

    def settle(self) -> Order | None:
        """Return what all are to do so that nothing is on trial for now, as for a save."""
        if self._experiment is not None:
            self._experiment.pause()
        if not self._adoption.is_due:  # what is to stay is no trial, and is set now
            self.course.wanted = self.course.known_good
        return self.course.order()

    def changed(self) -> None:
        """Take what the hands work with now, as the user changed it, for what is good."""
        self._leave()
        self.course.begin()
        self._watch_anew()

    def freeze(self) -> None:
        """Change nothing more until `thaw`; what is on trial is taken back."""
        if self.state != "frozen":
            self._leave()
            self._enter("frozen")

    def thaw(self) -> None:
        """Go on, with a new look at the job."""
        if self.state == "frozen":
            self._enter("safe_mode" if self._num_failures >= MOST_FAILURES else "observe")
            self._watch_anew()

    def close(self) -> None:
        """Take it that the run comes to its end: what is on trial is not to blame."""
        self._known.ends()

    def _enter(self, state: str) -> None:
        if state != self.state:
            self.state = state
            self._listener.state(state)

    def _watch_anew(self) -> None:
        """Look at the job as if for the first time, if anything may be tried."""
        self._situation = None
        self._observer.begin()
        if self.state not in OFF:
            self._enter("observe")

    def _begin_anew(self, speed: str) -> None:
        """Search again, for steps have become other than they were."""
        self._known.on_speed_shift(speed)
        self._rest = 0
        self._watch_anew()

    def _look(self, step: StepTime) -> None:
        """Take a window in which nothing is on trial."""
        if self._quiet:
            self._quiet -= 1
            return
        self._rest = max(0, self._rest - 1)
        reading = self._observer.add(step)
        if self._observer.shift is not None:
            self._begin_anew(self._observer.shift)
        elif self._rest or self.state in OFF:
            return
        elif self.state != "observe":  # it has warmed up, or soaked
            self._watch_anew()
        elif self._situation is not None:  # that of the last trial, which changed nothing
            self._try_next(self._situation, step)
        elif reading is not None:
            self._diagnose(reading, step)

    def _diagnose(self, reading: MetricsDelta, step: StepTime) -> None:
        situation = self._search.situation(reading, step, self.course.known_good)
        self._listener.diagnosed(situation.symptoms, reading)
        if not self._rules.acts:
            for experiment in self._search.advice(situation):
                self._listener.concluded(experiment.concluded("advised", experiment.proposal.why))
        elif not is_short_of_memory(situation):
            self._try_next(situation, step)

    def _try_next(self, situation: TunerInput, step: StepTime) -> None:
        """Put the most promising proposal on trial, if there is any."""
        usual = self._observer.baseline
        if usual is None:
            return
        self._enter("propose")
        for experiment, unsupported_reason in self._search.experiments(situation, step, usual):
            self._enter("preflight")
            self._experiment = experiment
            if unsupported_reason is None:
                self._known.begins(experiment.proposal.changes)
                self._listener.tries(experiment.proposal, experiment.before)
                self.course.set(experiment.wanted, experiment.proposal.why)
                return
            self._drop(unsupported_reason)
        self._situation = None
        self._enter("observe")

    def _go_on(self, experiment: Experiment, step: StepTime) -> None:
        """Take a window of a trial."""
        if experiment.is_held_up:
            self._drop("too few windows in a row could be measured")
        elif self.course.in_use != experiment.wanted:  # it paused
            self.course.wanted = experiment.wanted
        else:
            self._search.budget.spend(experiment.add(step, self._observer.baseline))
            self._weigh(experiment, step)

    def _weigh(self, experiment: Experiment, step: StepTime) -> None:
        trouble = self._sentinel.check(experiment.proposal, step)
        if trouble is not None and self.course.is_on_trial:
            self._drop(trouble, failed=True)
        elif experiment.is_overtaken:
            self._leave()
            self._begin_anew("other")
        else:
            self._enter("trial" if self.state == "applied" else self.state)
            self.course.wanted, judgement = experiment.wanted, experiment.judgement
            if judgement is not None:
                end = self._adopt if judgement.verdict == "accepted" else self._conclude
                end(experiment.concluded(judgement.verdict, judgement.reason))

    def _drop(self, reason: str, *, failed: bool = False) -> None:
        """End a trial that could not be made, or must not go on."""
        if self._experiment is None:
            return
        dropped = self._experiment.dropped(reason, in_use=self.course.in_use)
        self._conclude(dropped, is_proved=failed)
        self._num_failures += failed
        if self._num_failures >= MOST_FAILURES:
            self._make_safe(f"{self._num_failures} changes failed, the last as {reason}")

    def _leave(self) -> None:
        """End what is on trial without a verdict; it may be tried again."""
        self._observer.interrupted()
        self._known.ends()
        self._search.num_fruitless += self._experiment is not None and self._experiment.has_begun
        self._adoption.leave()
        self._experiment = self._situation = None
        self.course.wanted, self._quiet = self.course.known_good, SETTLE_STEPS
        if self.state not in OFF:
            self._enter("observe")

    def _conclude(self, conclusion: Conclusion, *, is_proved: bool = True) -> None:
        """End a trial that changes nothing."""
        self._enter("rollback")
        (self._known.reject if is_proved else self._known.mark_failed)(conclusion.proposal.changes)
        self._listener.concluded(conclusion)
        self._leave()
        self._situation = conclusion.situation

    def _adopt(self, conclusion: Conclusion) -> None:
        """Let a configuration be the one in use, as soon as all ranks work with it."""
        self._experiment = None
        self._adoption.begin(conclusion)
        self._adopt_if_in_use()

    def _adopt_if_in_use(self) -> None:
        if not self._adoption.end():
            return
        self._rest = self._rules.soak(self._step_seconds)
        self._observer.begin()
        if self.state != "safe_mode":
            self._enter("accept")
            self._enter("cooldown")

    def _relieve(self, step: StepTime) -> None:
        """Give something up for memory; what is on trial first."""
        if self._experiment is not None or self._adoption.is_due:
            if self.state in ("applied", "trial"):  # it may be what takes the memory
                self._drop(f"the risk of running out of memory is {step.oom_risk:.0%}")
            self._leave()
        elif (found := self._relief.find(step, self.course.known_good)) is not None:
            self._adopt(found)

    def _make_safe(self, reason: str) -> None:
        """Try nothing more; only running out of memory is still acted on."""
        self._leave()
        logger.warning("the tuner tries nothing more in this run: %s", reason)
        self._num_failures = MOST_FAILURES
        self._enter("frozen" if self.state == "frozen" else "safe_mode")
