"""From what the tuner does to metric values."""

from __future__ import annotations

from collections.abc import Sequence

from ...metrics.catalog import tuner
from ...metrics.recorder import Recorder
from .policy.decision import Decision
from .policy.types import Configuration, Symptom, Value

# A graph takes numbers only: of forms of numbers their bits.
_NUMBERS = {"bf16": 16, "fp16": 16, "int8": 8, "fp8": 8, "automatic": 0}


class TunerMetrics:
    """Publishes what the tuner of a rank tells; used on rank 0 only, on any thread."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        with recorder.commit():  # at 0, so that the first one counts as a rise
            for verdict in tuner.TUNER_DECISIONS.labels[0].values:
                recorder.add(tuner.TUNER_DECISIONS, 0, verdict)
            recorder.add(tuner.TUNER_EXPLORATION_SECONDS, 0)

    def state(self, now: str) -> None:
        """Tell in which state the tuner is, one of TUNER_STATES."""
        with self._recorder.commit():
            for state in tuner.TUNER_STATES:
                self._recorder.set(tuner.TUNER_STATE, state == now, state)

    def configured(self, configuration: Configuration) -> None:
        """Tell how the job works now."""
        with self._recorder.commit():
            for knob, value in configuration.items():
                self._recorder.set(tuner.TUNER_KNOB_VALUE, number_of(value), knob)

    def diagnosed(self, symptoms: Sequence[Symptom]) -> None:
        """Tell what holds the job back now; what is not named does not."""
        found = {symptom.name: symptom.ratio for symptom in symptoms}
        with self._recorder.commit():
            for name in tuner.SYMPTOMS:
                self._recorder.set(tuner.TUNER_SYMPTOM, found.get(name, 0.0), name)

    def decided(self, decision: Decision) -> None:
        """Tell what came of a change."""
        with self._recorder.commit():
            self._recorder.add(tuner.TUNER_DECISIONS, 1, decision.verdict)
            if decision.gain is not None:
                self._recorder.set(tuner.TUNER_GAIN, decision.gain, decision.knob)
            if decision.lower is not None:
                self._recorder.set(tuner.TUNER_GAIN_LOWER_BOUND, decision.lower, decision.knob)

    def explored(self, seconds: float) -> None:
        """Tell of training seconds that went into a trial."""
        self._recorder.add(tuner.TUNER_EXPLORATION_SECONDS, seconds)


def number_of(value: Value) -> float:
    """Return a knob's value as a number."""
    if isinstance(value, str):
        return float(_NUMBERS.get(value, 1))  # in use, whatever it is
    return float(value or 0)
