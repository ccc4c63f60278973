"""The micro-batch of an estimate: its size, its activations, and the largest that fits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ....errors import CommandLineError
from ...estimator.activations import Activations, typical_activations
from ...estimator.batch import MICRO, TOTAL, micro_batches
from ...estimator.options import read_options
from ...estimator.peak import Peak, largest_micro_batch, peak_of
from ...estimator.plan import Plan
from ...estimator.shapes import ModelShape, Topology

if TYPE_CHECKING:
    from torch import nn

_UNITS = {
    unit: size
    for letter, power in (("K", 1), ("M", 2), ("G", 3), ("T", 4))
    for unit, size in ((f"{letter}B", 1000**power), (f"{letter}IB", 1024**power))
}
_IN_PARTS = "not planned with tensor or pipeline parallelism"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """The options about memory, as they were given."""

    sequence: int | None = None
    micro_batch: int | None = None
    memory: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """What is known of a rank's batch.

    Attributes:
        micro_batches: Of one step.
        samples: Of a micro-batch; None where activations were not asked for.
        activations: Those of a micro-batch; None where they are not known.
        unknown: Why they are not known, in words.
        limit_bytes: Memory of the device; None where it was not told.
    """

    micro_batches: int = 1
    samples: int | None = None
    activations: Activations | None = None
    unknown: str = ""
    limit_bytes: int | None = None

    @property
    def activation_bytes(self) -> int:
        """Bytes of a micro-batch's activations; 0 where they are not known."""
        if self.activations is None or self.samples is None:
            return 0
        return self.activations.bytes_of(self.samples)

    def peak(self, plan: Plan) -> Peak:
        """Return the peak of a step, with the activations that are known."""
        return peak_of(
            plan.memory, micro_batches=self.micro_batches, activation_bytes=self.activation_bytes
        )

    def largest(self, plan: Plan) -> int | None:
        """Return the samples of the largest micro-batch that fits; None where that is not known."""
        if self.activations is None or self.limit_bytes is None:
            return None
        return largest_micro_batch(
            plan.memory, self.activations, self.limit_bytes, micro_batches=self.micro_batches
        )


def batch_plan(
    asked: BatchOptions,
    config: Mapping[str, Any],
    model: tuple[ModelShape, nn.Module | None],
    topology: Topology,
    origin: str,
) -> BatchPlan:
    """Work out what the options ask of one micro-batch.

    Raises:
        CommandLineError: They cannot be used.
        DsConfigError: The configuration's batch sizes cannot be.
    """
    limit = _check(asked)
    steps = micro_batches(config, topology.data_parallel, origin)
    if asked.sequence is None:
        return BatchPlan(micro_batches=steps, limit_bytes=limit)
    samples = asked.micro_batch or _samples(config, topology, steps)
    activations, unknown = None, _IN_PARTS
    if topology.tensor_parallel * topology.pipeline_parallel == 1:
        activations, unknown = _activations(model, config, samples, asked.sequence, origin)
    return BatchPlan(
        micro_batches=steps,
        samples=samples,
        activations=activations,
        unknown=unknown,
        limit_bytes=limit,
    )


def _check(asked: BatchOptions) -> int | None:
    for option, value in (("--sequence", asked.sequence), ("--micro-batch", asked.micro_batch)):
        if value is not None and value < 1:
            raise CommandLineError(f"{option} is {value}; give 1 or more")
    for option, given in (("--micro-batch", asked.micro_batch), ("--memory", asked.memory)):
        if given is not None and asked.sequence is None:
            raise CommandLineError(
                f"{option} is about activations; give the tokens of a sample, as --sequence 2048"
            )
    return None if asked.memory is None else _size(asked.memory)


def _size(text: str) -> int:
    digits = text.strip().upper()
    unit = next((unit for unit in _UNITS if digits.endswith(unit)), None)
    try:
        number = float(digits.removesuffix(unit)) * _UNITS[unit] if unit else math.nan
    except ValueError:
        number = math.nan
    if not 1 <= number < math.inf:
        raise CommandLineError(f"--memory {text} is no size; give it as 80GiB or 24GB")
    return int(number)


def _samples(config: Mapping[str, Any], topology: Topology, steps: int) -> int:
    """Return the configuration's micro-batch, given or worked out as DeepSpeed does."""
    samples, total = config.get(MICRO), config.get(TOTAL)
    if isinstance(samples, int):
        return samples
    if isinstance(total, int):
        return max(1, total // (steps * topology.data_parallel))
    raise CommandLineError(f"{MICRO} is not in the configuration; give --micro-batch")


def _activations(
    model: tuple[ModelShape, nn.Module | None],
    config: Mapping[str, Any],
    samples: int,
    tokens: int,
    origin: str,
) -> tuple[Activations | None, str]:
    shape, module = model
    options = read_options(config, origin=origin)
    if module is None:
        return typical_activations(shape, options, tokens), ""
    from ...estimator.trace_activations import UnknownActivationsError, trace_activations

    try:
        return trace_activations(module, options.model_dtype, samples=samples, tokens=tokens), ""
    except UnknownActivationsError as error:
        return None, f"a pass of token ids through the model fails: {error}"
