"""Says what the tuner finds and decides: log, journal, metrics and traces. On rank 0 only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...metrics.exporters.telemetry_data import Span, Value
from ...metrics.recorder import Recorder
from .metrics import TunerMetrics
from .policy.decision import Decision, Mode, decide
from .policy.decision_log import DecisionLog
from .policy.diagnose import MEMORY_IDLE
from .policy.ds_patch import ds_patch
from .policy.experiment import Conclusion
from .policy.messages import sentence_of, symptom_words, trial_words
from .policy.metrics_delta import MetricsDelta
from .policy.predict import num_micro_batches
from .policy.proposals import TunerInput
from .policy.types import Configuration, Proposal, Symptom

logger = logging.getLogger(__name__)


class TunerReporter:
    """What a controller tells, and an advisor. Only one of them speaks at a time.

    Args:
        recorder: Gets the metrics.
        folder: Returns the run folder, once it has one.
        step: Returns the number of the last step.
        world_size: Ranks of the job.
        mode: Whether the tuner may act.
        send: Sends a span to a collector; does nothing where there is none.
        clock: Unix seconds.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        folder: Callable[[], Path | None],
        step: Callable[[], int],
        world_size: int,
        mode: Mode,
        send: Callable[[Span], object],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._figures = TunerMetrics(recorder)
        self._decision_log = DecisionLog(folder)
        self._step, self._clock = step, clock
        self._world_size, self._mode = world_size, mode
        self._send = send
        self._num_decisions = 0
        self._told = {MEMORY_IDLE}  # which by itself is no reason to do anything

    def state(self, name: str) -> None:
        """Tell the state that the tuner is in now."""
        self._figures.state(name)

    def configured(self, configuration: Configuration) -> None:
        """Tell what the job works with now."""
        self._figures.configured(configuration)

    def diagnosed(self, symptoms: Sequence[Symptom], _: MetricsDelta) -> None:
        """Tell what holds the job back now; in the log what does so most, if it never did before.

        An advice says so itself.
        """
        self._figures.diagnosed(symptoms)
        if self._mode == "auto" and symptoms and symptoms[0].name not in self._told:
            self._told.add(symptoms[0].name)
            words = symptom_words(symptoms[0])
            logger.info("step %d: %s: looking for what helps", self._step(), words)

    def tries(self, proposal: Proposal, configuration: Configuration) -> None:
        """Tell what goes on trial."""
        logger.info("step %d: %s", self._step(), trial_words(proposal, configuration))

    def concluded(self, conclusion: Conclusion) -> None:
        """Tell what came of a proposal, or that it is advised."""
        self._num_decisions += 1
        decision = decide(
            conclusion,
            number=self._num_decisions,
            unix_seconds=self._clock(),
            step=self._step(),
            world_size=self._world_size,
            mode=self._mode,
        )
        sentence = sentence_of(decision)
        logger.info("%s%s", sentence, _by_hand(decision, conclusion.situation))
        self._decision_log.write(decision, conclusion)
        self._figures.decided(decision)
        self._figures.explored(decision.exploration_seconds)
        self._send(span_of(decision, sentence, _seconds(conclusion)))


def _by_hand(decision: Decision, situation: TunerInput) -> str:
    """Write what to put into the ds config, below a line of the log."""
    if decision.verdict != "advised":
        return ""
    now = situation.configuration
    then = {**now, **{change.knob: change.after for change in decision.changes}}
    before, after = (num_micro_batches(each, situation.samples_per_rank) for each in (now, then))
    return f"\n{ds_patch(decision.changes, (before, after))}"


def _seconds(conclusion: Conclusion) -> float:
    """Return how long the windows of a trial took, those that said nothing left out."""
    situation = conclusion.situation
    samples = situation.samples_per_rank * situation.facts.world_size
    return samples * sum(filter(None, conclusion.times))


def span_of(decision: Decision, sentence: str, seconds: float) -> Span:
    """Write a decision as a span that lasts as long as its trial."""
    known: dict[str, Value | None] = {
        "zerowatch.tuner.number": decision.number,
        "zerowatch.tuner.step": decision.step,
        "zerowatch.tuner.symptom": decision.symptom.name,
        "zerowatch.tuner.knob": decision.knob,
        "zerowatch.tuner.numerics": decision.numerics.name.lower(),
        "zerowatch.tuner.verdict": decision.verdict,
        "zerowatch.tuner.reason": decision.reason,
        "zerowatch.tuner.predicted_gain": decision.predicted_gain,
        "zerowatch.tuner.gain": decision.gain,
        "zerowatch.tuner.gain_lower_bound": decision.lower,
        "zerowatch.tuner.sentence": sentence,
    }
    end_ns = round(decision.unix_seconds * 1e9)
    return Span(
        name="tuner.decision",
        start_ns=end_ns - round(seconds * 1e9),
        end_ns=end_ns,
        attributes={name: value for name, value in known.items() if value is not None},
    )
