"""What each knob may do to the numbers of this job, and what is known of the job. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .registry import SPECS
from .types import Numerics

EXACT_RANKS = 2  # a sum of two is the same in either order

# They decide in which order a gradient's parts of several ranks are added up.
SUM_KNOBS = frozenset(
    (
        "reduce_bucket_size",
        "overlap_comm",
        "reduce_scatter",
        "use_multi_rank_bucket_allreduce",
        "asynchronous_reduction",
    )
)
# They decide which samples go through the model together.
_CUT_KNOBS = frozenset(("micro_batch_samples", "balance"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """What in a model makes a batch in pieces differ from the batch in one piece.

    Attributes:
        dropout: It draws random numbers, so other pieces get other ones.
        batch_statistics: It normalises by the samples that it sees together.
        expert_capacity: Its experts take so many tokens of those that they see together, and drop
            the rest.
        loss_decomposable: The loss of a batch is the weighted mean of its parts' losses, as it is
            not where samples are compared with each other. No model shows it; the user says so.
    """

    dropout: bool = False
    batch_statistics: bool = False
    expert_capacity: bool = False
    loss_decomposable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What stays the same while a job runs.

    Attributes:
        world_size: Data-parallel ranks.
        backend: What carries gradients: "gloo" or "nccl".
        gradient_bytes: Of all gradients, in the type that DeepSpeed sends them in.
        parameter_bytes: Of all parameters, likewise.
        gradient_width: Bytes of an element of a gradient on the wire.
        parameter_width: Likewise of a parameter.
        num_tensors: Parameters of the model, as tensors.
        traits: The model's.
    """

    world_size: int
    backend: str
    gradient_bytes: int
    parameter_bytes: int
    gradient_width: int = 4
    parameter_width: int = 4
    num_tensors: int = 1
    traits: ModelTraits = field(default_factory=ModelTraits)

    @property
    def num_gradients(self) -> float:
        """Elements of all gradients."""
        return self.gradient_bytes / self.gradient_width

    @property
    def num_parameters(self) -> float:
        """Elements of all parameters."""
        return self.parameter_bytes / self.parameter_width


def required_numerics(knob: str, facts: JobFacts) -> Numerics | None:
    """Return the least numerics that allows a knob to be turned in this job; None: none does.

    Args:
        knob: Name of one in the registry.
        facts: Of the job.
    """
    traits = facts.traits
    if knob in _CUT_KNOBS and traits.expert_capacity:
        return None
    if knob in SUM_KNOBS and facts.world_size <= EXACT_RANKS:
        return Numerics.BITWISE
    together = traits.dropout or traits.batch_statistics or not traits.loss_decomposable
    if knob in _CUT_KNOBS and together:
        return Numerics.STATISTICAL
    return SPECS[knob].numerics


def required_numerics_of_all(knobs: Iterable[str], facts: JobFacts) -> Numerics | None:
    """Return the least numerics that allows several knobs to be turned; None: none does."""
    least = Numerics.BITWISE
    for knob in knobs:
        numerics = required_numerics(knob, facts)
        if numerics is None:
            return None
        least = max(least, numerics)
    return least


def numerics_named(text: str) -> Numerics:
    """Return the numerics of a name as settings write it, such as "bitwise".

    Raises:
        KeyError: There is none of that name.
    """
    return Numerics[text.upper()]


def name_of_numerics(numerics: Numerics) -> str:
    """Return a numerics's name as settings write it."""
    return numerics.name.lower()
