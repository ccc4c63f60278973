"""Defines the controller's interface: the limits that the user sets, and the event listener."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ....metrics.settings import CrossRankSettings, TunerSettings
from .diagnose import Thresholds
from .policy_types import Configuration, Numerics, Proposal, State, Symptom
from .trial import Decision

WARMUP_STEPS = 5  # steps before the first diagnosis, in a TrainingRun and in any other run
MIN_COOLDOWN_STEPS = 5  # steps without a trial after an accepted change, however long a step is
_DEFAULTS = TunerSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerOptions:
    """Limits that the user sets to the tuner.

    Attributes:
        numerics: Strictness of numerics that every change keeps to.
        acts: Whether the tuner changes anything. If not, the tuner only advises.
        allows_rebuild: Whether the engine may be rebuilt.
        min_gain: Minimum gain of throughput worth a change.
        exploration_ratio: Largest share of the training time that trials may cost.
        cooldown_steps: Steps after an accepted change without a trial.
        cooldown_seconds: Seconds after an accepted change without a trial. The shorter one of
            `cooldown_steps` and `cooldown_seconds` applies.
        diagnosis_interval_seconds: Training time that a diagnosis is made from.
        exchange_seconds: Time between two comparisons of the ranks.
        total_steps: Steps of the whole training; None if unknown.
        thresholds: Thresholds of the diagnosis.
    """

    numerics: Numerics
    acts: bool = True
    allows_rebuild: bool = True
    min_gain: float = _DEFAULTS.min_gain
    exploration_ratio: float = _DEFAULTS.exploration_ratio
    cooldown_steps: int = _DEFAULTS.cooldown_steps
    cooldown_seconds: float = 10.0
    diagnosis_interval_seconds: float = _DEFAULTS.diagnosis_interval_seconds
    exchange_seconds: float = CrossRankSettings().interval_seconds
    total_steps: int | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)

    def cooldown(self, step_seconds: float) -> int:
        """Return the number of windows without a trial after an accepted change.

        Args:
            step_seconds: Duration of one window.
        """
        steps = round(self.cooldown_seconds / max(step_seconds, 1e-9))
        return min(self.cooldown_steps, max(MIN_COOLDOWN_STEPS, steps))


class TunerListener(Protocol):
    """Receives the events of a controller."""

    def on_state(self, state: State) -> None:
        """Handle a change of state."""

    def on_configuration(self, configuration: Configuration) -> None:
        """Handle a change of the configuration in use."""

    def on_observation_discarded(self, num: int, seconds: float) -> None:
        """Handle an observation that begins again, because step times changed.

        Args:
            num: Observations without a diagnosis, since the start or the last diagnosis.
            seconds: Training time of these.
        """

    def on_diagnosis(self, symptoms: Sequence[Symptom], seconds: float | None = None) -> None:
        """Handle a diagnosis.

        Args:
            symptoms: The symptoms found.
            seconds: Training time that the diagnosis was made from. None where a figure was
                missing, so that symptoms may have been overlooked.
        """

    def on_trial(self, proposal: Proposal, configuration: Configuration) -> None:
        """Handle the start of a trial of a proposal against the configuration in use."""

    def on_decision(self, decision: Decision) -> None:
        """Handle the decision on a proposal."""
