"""A job of one rank and one knob for a whole controller; its step times are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zerowatch.metrics.catalog import overhead, training
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.common.undo import Undo
from zerowatch.runtime.tuner.policy.controller import Controller
from zerowatch.runtime.tuner.policy.controller_interface import TunerOptions
from zerowatch.runtime.tuner.policy.policy_types import (
    Configuration,
    JobFacts,
    Numerics,
    Proposal,
    State,
    StepTime,
    SwitchResult,
    Symptom,
    Value,
)
from zerowatch.runtime.tuner.policy.trial import Decision

KNOB, OLD, NEW = "python_gc", "automatic", "between_steps"
SWITCH_SECONDS = 0.01
SAMPLES = 8
OTHER_RATIO = 0.3  # of a step, in no phase: the symptom of the knob


class OneKnobJob:
    """The knobs and the listener of a controller, and the source of its metrics.

    Args:
        gain: Gain of throughput with the knob at its new value.
        step_seconds: Time of a step with the old value.
        interval_seconds: Training time before each diagnosis.

    Attributes:
        decisions: Decisions of the controller.
        seconds: Training time so far, switches included.
        num_steps: Steps so far.
        accepted_after: Steps until the first accept; None without one.
    """

    def __init__(self, gain: float, *, step_seconds: float, interval_seconds: float = 2.0) -> None:
        self.decisions: list[Decision] = []
        self.accepted_after: int | None = None
        self.seconds, self.num_steps = 0.0, 0
        self._gain, self._step_seconds = gain, step_seconds
        self._value: Value = OLD
        self._recorder = Recorder()
        self._recorder.set_info(
            training.RUN_INFO, "run", "1", "2.13", "0.19", "gloo", "cpu", "1", "1"
        )
        options = TunerOptions(
            numerics=Numerics.BITWISE, diagnosis_interval_seconds=interval_seconds
        )
        facts = JobFacts(world_size=1, backend="gloo", gradient_bytes=1, parameter_bytes=1)
        self.controller = Controller(self, self._recorder, facts, options, self)

    @property
    def uses_new(self) -> bool:
        return self._value == NEW

    def run(self, noise: Sequence[float]) -> None:
        """Train a step for each factor of its time."""
        for factor in noise:
            exchanges = self.controller.needs_exchange
            usual = factor * self._step_seconds
            self._train(usual / (1 + self._gain) if self.uses_new else usual)
            request = self.controller.configuration.pending_switch() if exchanges else None
            if request is not None:
                self.apply(request.target)
                self.seconds += SWITCH_SECONDS
                self.controller.on_switched(
                    request, SwitchResult(done=True, seconds=SWITCH_SECONDS)
                )

    def _train(self, seconds: float) -> None:
        self.seconds += seconds
        self.num_steps += 1
        for phase, ratio in (("backward", 1 - OTHER_RATIO), ("other", OTHER_RATIO)):
            self._recorder.add(training.PHASE_SECONDS, ratio * seconds, phase)
        self._recorder.add(training.STEPS, 1)
        self._recorder.set(overhead.WATCH_LAST_UPDATE_TIMESTAMP, self.seconds)
        step = StepTime(number=self.num_steps, seconds=seconds, samples=SAMPLES)
        self.controller.on_window_end(step)

    def values(self) -> Configuration:
        return {KNOB: self._value}

    def options(self) -> Mapping[str, Sequence[Value]]:
        return {KNOB: (OLD, NEW)}

    def unsupported_reason(self, target: Configuration) -> str | None:
        return None

    def apply(self, target: Configuration) -> Undo:
        self._value = target[KNOB]
        return lambda: None

    def verify(self, target: Configuration) -> bool:
        return target[KNOB] == self._value

    def on_state(self, state: State) -> None:
        pass

    def on_configuration(self, configuration: Configuration) -> None:
        pass

    def on_observation_discarded(self, num: int, seconds: float) -> None:
        pass

    def on_diagnosis(self, symptoms: Sequence[Symptom], seconds: float | None = None) -> None:
        pass

    def on_trial(self, proposal: Proposal, configuration: Configuration) -> None:
        pass

    def on_decision(self, decision: Decision) -> None:
        self.decisions.append(decision)
        if decision.verdict == "accepted" and self.accepted_after is None:
            self.accepted_after = self.num_steps
