"""The words that the tuner's parts share. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol

# A knob's setting; None stands for "not used", as of a form of compression.
Value = bool | int | str | None
# By knob. Whole ones name every knob that this job has.
Configuration = Mapping[str, Value]
Undo = Callable[[], None]

Tier = Literal["live", "rebuild"]
Verdict = Literal["accepted", "rolled_back", "rejected", "advised"]


class Numerics(IntEnum):
    """What a change may do to the numbers; each allows what those before it allow."""

    BITWISE = 0
    REASSOCIATION = 1  # sums in another order
    STATISTICAL = 2  # other roundings, the same expectation
    UNRESTRICTED = 3  # another batch, another learning rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """Something that holds the job back.

    Attributes:
        name: One of SYMPTOMS in `metrics/catalog/tuner.py`.
        ratio: Its share, such as of training time; what the thresholds are about.
        evidence: The figures that it was told from, by a short name with its unit.
    """

    name: str
    ratio: float
    evidence: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One change that may help.

    Attributes:
        changes: What differs from the configuration in use; one knob, or several where a whole
            configuration is remembered.
        symptom: What it is for.
        tier: Whether the engine has to be rebuilt for it.
        numerics: The least that allows it.
        predicted_gain: Of throughput, 0.5 for half as much again; None where nothing tells.
        why: Half a sentence for people.
        relaxes: Whether it takes back what is no longer needed, so that it need not gain anything.
    """

    changes: Configuration
    symptom: Symptom
    tier: Tier
    numerics: Numerics
    predicted_gain: float | None
    why: str
    relaxes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """What the controller learns of each window.

    Attributes:
        number: Of the step.
        seconds: Wall time from the end of the window before, waiting for data included.
        samples: Over all ranks.
        usable: False where something other than training fell into it: a checkpoint, an
            evaluation, a change, a window that was run again.
        oom_risk: The highest of any rank, 0 to 1.
        replays: Attempts at it that ran out of memory.
        loss: Mean over all ranks; None where it is not known or not finite.
    """

    number: int
    seconds: float
    samples: int
    usable: bool = True
    oom_risk: float = 0.0
    replays: int = 0
    loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What all ranks are to do at one safe point: to work with this configuration.

    Attributes:
        target: The whole of it.
        why: Half a sentence for people.
        checked: Whether memory is looked at first; not on the way back to what worked before.
    """

    target: Configuration
    why: str
    checked: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an order ended, the same on all ranks.

    Attributes:
        done: Whether all ranks work with the target; else all work as before.
        reason: Why not; the first rank's that failed.
        seconds: How long training stood still.
        refused: Whether a rank would not, such as for its memory, before anything was touched.
        undone: Whether, where it failed, all ranks really are as before. If not, nobody may
            change anything more.
    """

    done: bool
    reason: str = ""
    seconds: float = 0.0
    refused: bool = False
    undone: bool = True


class KnobSetter(Protocol):
    """What turns the knobs of a job, on each rank. Between two windows only."""

    def values(self) -> Configuration:
        """Return how this rank works now: every knob that this job has."""

    def options(self) -> Mapping[str, Sequence[Value]]:
        """Return what each knob could be set to here, in order; a knob that is gone is absent."""

    def unsupported_reason(self, target: Configuration) -> str | None:
        """Say why this rank should not work with that, such as its memory; None if it may."""

    def apply(self, target: Configuration) -> Undo:
        """Turn what differs, and return what puts back exactly what was there.

        Raises:
            ZerowatchError: Nothing was changed.
        """

    def verify(self, target: Configuration) -> bool:
        """Whether this rank really works with that."""
