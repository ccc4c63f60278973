"""A tuned job without engine and clock: a slow link, three knobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zerowatch.metrics.catalog import communication, overhead, training
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.common.undo import Undo
from zerowatch.runtime.tuner.policy.controller import Controller
from zerowatch.runtime.tuner.policy.controller_interface import TunerOptions
from zerowatch.runtime.tuner.policy.history_file import HistoryEntry
from zerowatch.runtime.tuner.policy.policy_types import (
    Configuration,
    JobFacts,
    Numerics,
    Proposal,
    State,
    StepTime,
    SwitchRequest,
    SwitchResult,
    Symptom,
    Value,
)
from zerowatch.runtime.tuner.policy.search_history import SearchHistory
from zerowatch.runtime.tuner.policy.trial import Decision

STEP_SECONDS, SAMPLES = 1.0, 16
WAITING = 0.6  # share of a step, for communication
LINK_BANDWIDTH = 1e8  # bytes a second, at pace 1
OPTIONS: Mapping[str, Sequence[Value]] = {
    "micro_batch_samples": (4, 8),
    "gradient_compression": (None, "int8"),
    "activation_checkpointing": (False, True),
}
START: Configuration = {
    "micro_batch_samples": 4,
    "gradient_compression": None,
    "activation_checkpointing": False,
}
DONE = SwitchResult(done=True, seconds=0.1)


class Job:
    """Two ranks on a slow link; micro-batches of 8 halve a step, compression adds a third.

    Attributes:
        now: Configuration in use.
        states, decisions, configurations, discarded, num_trials: Events of the controller.
        kept, trials, crashed: The stored history by context; what is recorded as on trial; trials
            in which another job may have crashed.
        coverage, oom_risk, replays, loss: Values that the next windows report.
        is_watched: Whether metrics are updated.
        is_usable: Whether step times are usable.
        pace, saving: Factors of the time of all windows, and of those with larger micro-batches.
        answer: Returns the result of a switch request.
    """

    def __init__(
        self, *, acts: bool = True, after: Job | None = None, total_steps: int | None = None
    ) -> None:
        self.now = dict(START)
        self.states: list[State] = []
        self.decisions: list[Decision] = []
        self.configurations: list[Configuration] = []
        self.discarded: list[tuple[int, float]] = []
        self.num_trials = self.num_renewals = 0
        self.kept: dict[str, HistoryEntry] = dict(after.kept) if after else {}
        self.trials: list[Configuration] = []
        self.crashed: Sequence[Configuration] = ()
        self.coverage, self.oom_risk, self.replays, self.loss = 1.0, 0.0, 0, 1.0
        self.is_watched = self.is_usable = True
        self.pace, self.saving = 1.0, 0.5
        self.answer: Callable[[SwitchRequest], SwitchResult] = lambda _: DONE
        self._recorder, self._steps = Recorder(), 0
        self._recorder.set_info(
            training.RUN_INFO, "run", "1", "2.13", "0.19", "gloo", "cpu", "2", "2"
        )
        facts = JobFacts(world_size=2, backend="gloo", gradient_bytes=10**8, parameter_bytes=10**8)
        options = TunerOptions(
            numerics=Numerics.STATISTICAL,
            acts=acts,
            diagnosis_interval_seconds=4.0,
            cooldown_steps=5,
            total_steps=total_steps,
        )
        history = SearchHistory(self.kept, after.trials if after else (), self)
        self.controller = Controller(self, self._recorder, facts, options, self, history)

    def run(self, num_steps: int, until: Callable[[], bool] = lambda: False) -> None:
        for _ in range(num_steps):
            exchanges = self.controller.needs_exchange
            self._train()
            request = self.controller.configuration.pending_switch() if exchanges else None
            if request is not None:
                self.carry_out(request)
            if until():
                return

    def carry_out(self, request: SwitchRequest) -> None:
        result = self.answer(request)
        if result.done:
            self.now = {**self.now, **request.target}
        self.controller.on_switched(request, result)

    def until_trial(self) -> None:
        """Train until something other than START is in use."""
        self.run(60, until=lambda: self.now != START)
        assert self.now != START

    def _train(self) -> None:
        self._steps += 1
        faster = self.saving if self.now["micro_batch_samples"] == 8 else 1.0
        seconds = (
            self.pace * STEP_SECONDS * faster * (4 / 3 if self.now["gradient_compression"] else 1.0)
        )
        add, set_ = self._recorder.add, self._recorder.set
        add(training.PHASE_SECONDS, seconds, "backward")
        add(training.STEPS, 1)
        add(communication.COMM_SECONDS, WAITING * seconds, "dp")
        add(communication.COMM_EXPOSED_SECONDS, WAITING * seconds, "dp")
        add(communication.COMM_CAUSE_SECONDS, WAITING * seconds, "bandwidth")
        add(communication.COLLECTIVE_WIRE_BYTES, 10**8, "all_reduce", "dp")
        set_(communication.COMM_COVERAGE_RATIO, self.coverage)
        set_(communication.COMM_LINK_BANDWIDTH, LINK_BANDWIDTH / self.pace, "dp")
        if self.is_watched:
            set_(overhead.WATCH_LAST_UPDATE_TIMESTAMP, float(self._steps))
        self.controller.on_window_end(
            StepTime(
                number=self._steps,
                seconds=seconds,
                samples=SAMPLES,
                usable=self.is_usable,
                oom_risk=self.oom_risk,
                replays=self.replays,
                loss=self.loss,
            )
        )

    def save(self, context: str, entry: HistoryEntry) -> None:
        self.kept[context] = entry

    def save_trial(self, changes: Configuration) -> None:
        self.trials = [changes] if changes else []

    def renew_trial(self) -> None:
        assert self.trials
        self.num_renewals += 1

    def suspected_trials(self) -> Sequence[Configuration]:
        return self.crashed

    def values(self) -> Configuration:
        return dict(self.now)

    def options(self) -> Mapping[str, Sequence[Value]]:
        return OPTIONS

    def unsupported_reason(self, target: Configuration) -> str | None:
        return None

    def apply(self, target: Configuration) -> Undo:
        raise NotImplementedError

    def verify(self, target: Configuration) -> bool:
        raise NotImplementedError

    def on_state(self, state: State) -> None:
        self.states.append(state)

    def on_configuration(self, configuration: Configuration) -> None:
        self.configurations.append(configuration)

    def on_observation_discarded(self, num: int, seconds: float) -> None:
        self.discarded.append((num, seconds))

    def on_diagnosis(self, symptoms: Sequence[Symptom], seconds: float | None = None) -> None:
        pass

    def on_trial(self, proposal: Proposal, configuration: Configuration) -> None:
        self.num_trials += 1

    def on_decision(self, decision: Decision) -> None:
        self.decisions.append(decision)
