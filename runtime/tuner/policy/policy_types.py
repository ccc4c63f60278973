"""Defines the plain data that the tuner's parts exchange, and the interface to the knobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Literal, Protocol

from ....metrics.thresholds import OOM_RISK_HIGH

# A knob's setting; None means "not used", e.g. no gradient compression.
Value = bool | int | str | None
# Values by knob name. A complete configuration has every knob of the job.
Configuration = Mapping[str, Value]

# How a change is applied: to the engine in use, or by rebuilding the engine.
ApplyMode = Literal["live", "rebuild"]
# Whether the tuner only logs advice, or changes knobs itself.
Mode = Literal["advise", "auto"]
# The outcome of a proposal, as in the label `verdict` of metrics:
# - accepted: The change stays in use.
# - rolled_back: The change was in use and was undone, because training was slower, ran out of
#   memory, or had a loss that was too high.
# - rejected: The gain is too small or uncertain, or the change was not tried, e.g. for lack of
#   memory.
# - interrupted: The trial ended without a result, and the change was undone. It may be tried again.
# - not_undone: The change could not be undone on all ranks. Training continues with the values that
#   were read back.
# - advised: The change is logged as advice, and not applied.
Verdict = Literal["accepted", "rolled_back", "rejected", "interrupted", "not_undone", "advised"]


class Numerics(IntEnum):
    """How a change may affect the numbers. Each value includes the effects of earlier values."""

    BITWISE = 0
    REASSOCIATION = 1  # sums in another order
    STATISTICAL = 2  # other rounding, the same expectation
    UNRESTRICTED = 3  # another batch size, another learning rate

    @classmethod
    def of_setting(cls, text: str) -> Numerics:
        """Return the value of a setting's text, such as "bitwise"."""
        return cls[text.upper()]

    @property
    def setting(self) -> str:
        """The text in settings and in decisions."""
        return self.name.lower()


class State(StrEnum):
    """States of the controller: TUNER_STATES of `metrics/catalog/tuner.py`."""

    WARMUP = "warmup"
    OBSERVE = "observe"  # measuring before the next diagnosis
    PROPOSE = "propose"
    PREFLIGHT = "preflight"  # all ranks check their memory, then switch
    APPLIED = "applied"  # the change is in use on all ranks
    TRIAL = "trial"  # old and new configuration take turns
    ACCEPT = "accept"
    ROLLBACK = "rollback"
    COOLDOWN = "cooldown"  # after an accepted change
    SAFE_MODE = "safe_mode"  # changes failed; only OOM risk is acted on
    FROZEN = "frozen"  # the stop file exists


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """Properties of a model that make a split batch differ from the whole batch.

    Attributes:
        dropout: The model draws random numbers, so other micro-batches get other masks.
        batch_statistics: The model normalizes over the samples of a micro-batch.
        expert_capacity: Its experts take a limited number of tokens of a micro-batch and drop the
            rest.
        loss_decomposable: The loss of a batch is the weighted mean of its parts' losses. This does
            not hold if samples are compared with each other. Only the user knows this property.
    """

    dropout: bool = False
    batch_statistics: bool = False
    expert_capacity: bool = False
    loss_decomposable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """Properties of a job that are constant while it runs.

    Attributes:
        world_size: Data-parallel ranks.
        backend: Backend of the gradients' process group: "gloo" or "nccl".
        gradient_bytes: Bytes of all gradients, in the type that DeepSpeed sends them in.
        parameter_bytes: Bytes of the trained parameters, in the type that DeepSpeed sends them in.
            ZeRO 1 and 2 gather them after each step.
        gathered_bytes: Bytes of all parameters, which ZeRO 3 gathers: the trained and the frozen
            ones. None if all are trained.
        gradient_width: Bytes of a gradient element on the wire.
        parameter_width: Bytes of a parameter element on the wire.
        num_tensors: Parameter tensors of the model, with frozen ones.
        traits: Properties of the model's modules.
    """

    world_size: int
    backend: str
    gradient_bytes: int
    parameter_bytes: int
    gathered_bytes: int | None = None
    gradient_width: int = 4
    parameter_width: int = 4
    num_tensors: int = 1
    traits: ModelTraits = field(default_factory=ModelTraits)

    @property
    def num_gradients(self) -> float:
        """Elements of all gradients."""
        return self.gradient_bytes / self.gradient_width

    @property
    def stage_3_bytes(self) -> int:
        """Bytes of all parameters, which ZeRO 3 gathers in each pass."""
        return self.parameter_bytes if self.gathered_bytes is None else self.gathered_bytes

    @property
    def num_parameters(self) -> float:
        """Elements of all parameters, with frozen ones."""
        return self.stage_3_bytes / self.parameter_width


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """A cause that slows the job down or endangers it.

    Attributes:
        name: One of SYMPTOMS in `metrics/catalog/tuner.py`.
        ratio: The value that is compared with the threshold, such as a share of training time.
        evidence: The figures that it was derived from, by a short name that ends in the unit.
    """

    name: str
    ratio: float
    evidence: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One change that may help against a symptom.

    Attributes:
        changes: Values that differ from the configuration in use. One knob with its partners, or
            several where a whole configuration is restored from the history.
        symptom: The symptom.
        apply_mode: Whether the engine has to be rebuilt.
        numerics: The strictest numerics that allow it.
        predicted_gain: Predicted gain of throughput, 0.5 for half as much again; None if unknown.
        reason: What it is for, as half a sentence for messages.
        relaxes: Whether it undoes a measure that is no longer needed. Such a change need not make
            training faster.
    """

    changes: Configuration
    symptom: Symptom
    apply_mode: ApplyMode
    numerics: Numerics
    predicted_gain: float | None
    reason: str
    relaxes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Time and results of one step, which the controller receives.

    Attributes:
        number: Number of the step.
        seconds: Wall time since the end of the previous step, data loading included.
        samples: Samples of the step on all ranks.
        usable: Whether the step's time contains only training with the configuration in use. False
            if it contains a checkpoint, an evaluation, a change or a replay, or if the step's batch
            was loaded before a change of its size or split.
        oom_risk: Highest known OOM risk of any rank, 0 to 1; None if no rank's is known.
        replays: Number of attempts at the step that ran out of memory.
        loss: Mean loss over all ranks; None if unknown or not finite.
    """

    number: int
    seconds: float
    samples: int
    usable: bool = True
    oom_risk: float | None = 0.0
    replays: int = 0
    loss: float | None = None

    @property
    def is_risky(self) -> bool:
        """Whether memory is likely to run out soon."""
        return self.oom_risk is not None and self.oom_risk >= OOM_RISK_HIGH


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRequest:
    """A configuration that all ranks are to switch to between two windows.

    Attributes:
        target: The complete configuration.
        reason: What it is for, as half a sentence for messages.
        checked: Whether each rank first checks its memory. False for a rollback.
    """

    target: Configuration
    reason: str
    checked: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchResult:
    """Whether all ranks have switched; the same on all ranks.

    Attributes:
        done: Whether all ranks use the target. If not, see `undone`.
        reason: Reason for a failure, from the first rank that failed.
        seconds: Time for which training was paused.
        refused: Whether a rank refused before anything was changed, e.g. for lack of memory.
        undone: Whether, after a failure, all ranks were verified to be as before. If not, nothing
            may be changed any more.
        remaining_changes: The values on each rank that differ from those before, as text. Empty if
            there are none.
    """

    done: bool
    reason: str = ""
    seconds: float = 0.0
    refused: bool = False
    undone: bool = True
    remaining_changes: str = ""


class KnobSetter(Protocol):
    """Reads and sets the knobs of a job on one rank, between two windows only."""

    @property
    def has_engine(self) -> bool:
        """Whether the job can train: a rebuild may remove the engine and then fail."""

    def values(self) -> Configuration:
        """Return the current value of every knob that this job has."""

    def options(self) -> Mapping[str, Sequence[Value]]:
        """Return the possible values of each knob in order; fixed knobs are absent."""

    def unsupported_reason(self, target: Configuration) -> str | None:
        """Return why this rank should not use a configuration, e.g. its memory; else None."""

    def apply(self, target: Configuration) -> Callable[[], None]:
        """Set the knobs that differ, and return an undo that restores exactly the values before.

        Raises:
            ZerowatchError: Nothing was changed.
        """

    def verify(self, target: Configuration) -> bool:
        """Whether this rank uses that configuration, read back from the engine."""
