"""Reports the tuner's diagnoses and decisions: log, decision log, metrics, traces. Rank 0 only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from ...metrics.catalog import tuner
from ...metrics.exporters.telemetry_data import AttributeValue, Span
from ...metrics.recorder import Recorder
from ..instrumentation.watch_context import WatchContext
from .policy.decision_log import DecisionLog, DecisionRecord, make_record
from .policy.decision_messages import (
    format_decision,
    format_discarded,
    format_ds_config_diff,
    format_symptom,
    format_trial,
)
from .policy.diagnose import MEMORY_IDLE, MEMORY_PRESSURE
from .policy.policy_types import Configuration, Mode, Numerics, Proposal, State, Symptom, Value
from .policy.predict import num_micro_batches
from .policy.proposals import TunerInput, is_memory_short
from .policy.trial import Decision

logger = logging.getLogger(__name__)

# Metric values are numbers. A data type is published as its number of bits, "automatic" as 0, and
# any other text as 1.
_NUMBERS = {"bf16": 16, "fp16": 16, "int8": 8, "fp8": 8, "automatic": 0}
MAX_DISCARDED = 3  # from so many observations in a row without a diagnosis on, this is logged


class DecisionReporter:
    """Publishes the events of a controller, or the diagnoses of the advisor.

    Either the controller or the advisor uses the reporter, never both at the same time.

    Args:
        context: Recorder, engine and run folder of the watch.
        mode: Whether the tuner may act.
        send: Sends a span to a collector; does nothing without one.
        clock: Unix seconds.
    """

    def __init__(
        self,
        context: WatchContext,
        *,
        mode: Mode,
        send: Callable[[Span], object],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._context, self._mode = context, mode
        self._send, self._clock = send, clock
        self._metrics = TunerMetrics(context.recorder)
        self._decision_log = DecisionLog()
        self._num_decisions = 0
        self._in_use: Configuration = {}
        self._logged: set[str] = set()

    def on_state(self, state: State) -> None:
        """Publish the controller's state."""
        self._metrics.set_state(state)

    def on_configuration(self, configuration: Configuration) -> None:
        """Publish the values of the knobs."""
        self._in_use = dict(configuration)
        self._metrics.set_configuration(configuration)

    def on_start(self, *, numerics: Numerics, interval_seconds: float) -> None:
        """Log that the tuner is on."""
        logger.info(
            "tuner: on, observing %g s of training before the first diagnosis; numerics %s",
            interval_seconds,
            numerics.setting,
        )

    def on_observation_discarded(self, num: int, seconds: float) -> None:
        """Count the observations without a diagnosis. Log once that a few in a row ended so.

        In mode "advise" nothing is logged.

        Args:
            num: Observations without a diagnosis, since the start or the last diagnosis.
            seconds: Training time of these.
        """
        self._metrics.add_discarded_observation()
        if num >= MAX_DISCARDED and self._mode == "auto":
            self._log_once("discarded", f"tuner: {format_discarded(num, f'{seconds:.0f} s')}")

    def on_diagnosis(self, symptoms: Sequence[Symptom], seconds: float | None = None) -> None:
        """Publish the symptoms. Log the first one to act on if it is new, and their absence once.

        In mode "advise" nothing is logged here, because the log line of an advice has its symptom.

        Args:
            symptoms: The symptoms found, the most important one first.
            seconds: Training time that the diagnosis was made from; None if a figure was missing.
        """
        self._metrics.set_symptoms(symptoms)
        if self._mode != "auto":
            return
        others = [one for one in symptoms if one.name not in (MEMORY_IDLE, MEMORY_PRESSURE)]
        pressure = next((one for one in symptoms if one.name == MEMORY_PRESSURE), None)
        over = "" if seconds is None else f" (measured over {seconds:.0f} s of training)"
        is_short = is_memory_short(symptoms)
        if pressure is not None:
            tried = "nothing is tried" if is_short else "no change that needs memory is tried"
            self._log_once(tried, f"{format_symptom(pressure)}: {tried}")
        if others and not is_short:
            which = "" if pressure is None else " that needs no memory"
            found = f"{format_symptom(others[0])}{over}: searching for a change{which}"
            self._log_once(others[0].name, found)
        elif pressure is None and not others and seconds is not None:
            self._log_once("nothing", f"tuner: nothing holds this run back{over}")

    def _log_once(self, key: str, message: str) -> None:
        if key not in self._logged:
            self._logged.add(key)
            logger.info("step %d: %s", self._step(), message)

    def on_trial(self, proposal: Proposal, configuration: Configuration) -> None:
        """Log the start of a trial."""
        logger.info("step %d: %s", self._step(), format_trial(proposal, configuration))

    def on_decision(self, decision: Decision) -> None:
        """Log, record and publish a decision, which may be an advice."""
        self._num_decisions += 1
        record = make_record(
            decision,
            number=self._num_decisions,
            unix_seconds=self._clock(),
            step=self._step(),
            in_use=self._in_use,
            world_size=self._context.identity.world_size,
            mode=self._mode,
        )
        message = format_decision(record)
        level = logging.WARNING if record.verdict == "not_undone" else logging.INFO
        logger.log(level, "%s%s", message, _advice_diff(record, decision.inputs))
        self._decision_log.write(self._context.folder(), record, decision)
        self._metrics.add_decision(record)
        self._send(decision_span(record, message, _trial_seconds(decision)))

    def _step(self) -> int:
        return getattr(self._context.engine(), "global_steps", 0)


class TunerMetrics:
    """Publishes the metrics of the tuner; on rank 0 only, on any thread."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        recorder.start_counters(tuner.METRICS)

    def set_state(self, current: State) -> None:
        """Publish the state."""
        with self._recorder.commit():
            for state in tuner.TUNER_STATES:
                self._recorder.set(tuner.TUNER_STATE, state == current, state)

    def set_configuration(self, configuration: Configuration) -> None:
        """Publish the values of the knobs."""
        with self._recorder.commit():
            for knob, value in configuration.items():
                self._recorder.set(tuner.TUNER_KNOB_VALUE, to_number(value), knob)

    def set_symptoms(self, symptoms: Sequence[Symptom]) -> None:
        """Publish the symptoms. A symptom that was not found is published as 0."""
        found = {symptom.name: symptom.ratio for symptom in symptoms}
        with self._recorder.commit():
            for name in tuner.SYMPTOMS:
                self._recorder.set(tuner.TUNER_SYMPTOM, found.get(name, 0.0), name)

    def add_discarded_observation(self) -> None:
        """Count an observation without a diagnosis."""
        with self._recorder.commit():
            self._recorder.add(tuner.TUNER_DISCARDED_OBSERVATIONS, 1)

    def add_decision(self, record: DecisionRecord) -> None:
        """Count a record, its gain and its cost."""
        with self._recorder.commit():
            self._recorder.add(tuner.TUNER_DECISIONS, 1, record.verdict)
            if record.gain is not None:
                self._recorder.set(tuner.TUNER_GAIN, record.gain, record.knob)
            if record.lower is not None:
                self._recorder.set(tuner.TUNER_GAIN_LOWER_BOUND, record.lower, record.knob)
            self._recorder.add(tuner.TUNER_EXPLORATION_SECONDS, record.exploration_seconds)


def to_number(value: Value) -> float:
    """Return a knob's value as a number."""
    if isinstance(value, str):
        return float(_NUMBERS.get(value, 1))
    return float(value or 0)


def decision_span(record: DecisionRecord, message: str, seconds: float) -> Span:
    """Return a decision as a span that is as long as its trial."""
    attributes: dict[str, AttributeValue | None] = {
        "zerowatch.tuner.number": record.number,
        "zerowatch.tuner.step": record.step,
        "zerowatch.tuner.symptom": record.symptom.name,
        "zerowatch.tuner.knob": record.knob,
        "zerowatch.tuner.numerics": record.numerics.setting,
        "zerowatch.tuner.verdict": record.verdict,
        "zerowatch.tuner.reason": record.reason,
        "zerowatch.tuner.predicted_gain": record.predicted_gain,
        "zerowatch.tuner.gain": record.gain,
        "zerowatch.tuner.gain_lower_bound": record.lower,
        "zerowatch.tuner.sentence": message,
    }
    end_ns = round(record.unix_seconds * 1e9)
    return Span(
        name="tuner.decision",
        start_ns=end_ns - round(seconds * 1e9),
        end_ns=end_ns,
        attributes={name: value for name, value in attributes.items() if value is not None},
    )


def _advice_diff(record: DecisionRecord, inputs: TunerInput) -> str:
    """Return the diff of the ds config that follows an advice in the log; "" if not an advice."""
    if record.verdict != "advised":
        return ""
    now = inputs.configuration
    then = {**now, **{change.knob: change.after for change in record.changes}}
    before, after = (num_micro_batches(each, inputs.samples_per_rank) for each in (now, then))
    return f"\n{format_ds_config_diff(record.changes, (before, after))}"


def _trial_seconds(decision: Decision) -> float:
    """Return the duration of the usable windows of a trial."""
    inputs = decision.inputs
    samples = inputs.samples_per_rank * inputs.facts.world_size
    return samples * sum(filter(None, decision.times))
