"""What the tuner decided, as plain data for people and for the disk."""

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
    """One knob, as it was and as it was to be."""

    knob: str
    before: Value
    after: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One change that was tried, refused or advised.

    Attributes:
        number: Of the decision in this run, from 1.
        unix_seconds: When it was made.
        step: The last step before it.
        symptom: What it was for.
        changes: What was to differ.
        numerics: The least that allows it.
        predicted_gain: Of throughput, 0.5 for half as much again; None where nothing told.
        gain: As measured, likewise; None where it was not tried.
        lower: What it gained at least, by the interval of its measurement.
        upper: And at most.
        pairs: Pairs of blocks of steps it was measured on.
        steps: Steps that the trial took.
        exploration_seconds: What the trial and its changes took beyond training as before.
        verdict: What came of it.
        reason: Half a sentence for people.
        context: The surroundings in which it holds: link, lengths, ranks.
        world_size: Ranks of the job.
        mode: Whether the tuner could act.
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
        """The knob that was turned, or "several"."""
        return self.changes[0].knob if len(self.changes) == 1 else SEVERAL


def changes_of(configuration: Configuration, changes: Configuration) -> tuple[Change, ...]:
    """List what a proposal would have differ from the configuration in use, by knob."""
    return tuple(
        Change(knob=knob, before=configuration.get(knob), after=value)
        for knob, value in changes.items()
        if knob not in configuration or configuration[knob] != value
    )


def decide(
    conclusion: Conclusion,
    *,
    number: int,
    unix_seconds: float,
    step: int,
    world_size: int,
    mode: Mode,
) -> Decision:
    """Write down what came of a proposal."""
    proposal, situation, found = conclusion.proposal, conclusion.situation, conclusion.judgement
    return Decision(
        number=number,
        unix_seconds=unix_seconds,
        step=step,
        symptom=proposal.symptom,
        changes=changes_of(situation.configuration, proposal.changes),
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
        context=situation.context or context_of(situation.reading),
        world_size=world_size,
        mode=mode,
    )
