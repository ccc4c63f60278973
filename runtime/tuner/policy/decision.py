"""A decision of the tuner as plain data, for the log and for `decisions.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .diagnose import context_of
from .experiment import Conclusion
from .types import Configuration, Numerics, Symptom, Value, Verdict

SEVERAL = "several"

Mode = Literal["advise", "auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Value of one knob before and after."""

    knob: str
    before: Value
    after: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One change that was tried, refused or advised.

    Attributes:
        number: Number of the decision in this run, from 1.
        unix_seconds: Time of the decision.
        step: The last step before it.
        symptom: The symptom it was for.
        changes: The proposed changes.
        numerics: The strictest numerics that allow it.
        predicted_gain: Predicted gain of throughput, 0.5 for half as much again; None if unknown.
        gain: Measured gain, likewise; None where it was not tried.
        lower: Lower bound of the gain.
        upper: Upper bound of the gain.
        pairs: Compared pairs of blocks of steps.
        steps: Steps of the trial.
        exploration_seconds: Training time that the trial and its switches cost.
        verdict: The verdict.
        reason: Half a sentence for people.
        context: Context in which it holds: link, sample length, ranks.
        world_size: Ranks of the job.
        mode: Whether the tuner may act.
    """

    number: int
    unix_seconds: float
    step: int
    symptom: Symptom
    changes: Sequence[Change]
    numerics: Numerics
    predicted_gain: float | None
    gain: float | None = None
    lower: float | None = None
    upper: float | None = None
    pairs: int = 0
    steps: int = 0
    exploration_seconds: float = 0.0
    verdict: Verdict
    reason: str
    context: str
    world_size: int
    mode: Mode

    @property
    def knob(self) -> str:
        """The changed knob, or "several"."""
        return self.changes[0].knob if len(self.changes) == 1 else SEVERAL


def changes_of(configuration: Configuration, changes: Configuration) -> tuple[Change, ...]:
    """Return the values that differ from the configuration in use, by knob."""
    return tuple(
        Change(knob=knob, before=configuration.get(knob), after=value)
        for knob, value in changes.items()
        if knob not in configuration or configuration[knob] != value
    )


def make_decision(
    conclusion: Conclusion,
    *,
    number: int,
    unix_seconds: float,
    step: int,
    world_size: int,
    mode: Mode,
) -> Decision:
    """Return the decision that a conclusion amounts to."""
    proposal, inputs, found = conclusion.proposal, conclusion.inputs, conclusion.judgement
    return Decision(
        number=number,
        unix_seconds=unix_seconds,
        step=step,
        symptom=proposal.symptom,
        changes=changes_of(inputs.configuration, proposal.changes),
        numerics=proposal.numerics,
        predicted_gain=proposal.predicted_gain,
        gain=None if found is None else found.gain,
        lower=None if found is None else found.lower,
        upper=None if found is None else found.upper,
        pairs=0 if found is None else found.pairs,
        steps=len(conclusion.times),
        exploration_seconds=conclusion.cost_seconds,
        verdict=conclusion.verdict,
        reason=conclusion.reason,
        context=inputs.context or context_of(inputs.reading),
        world_size=world_size,
        mode=mode,
    )
