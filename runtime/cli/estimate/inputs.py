"""Inputs of an estimate, from command-line options: the model, its micro-batch, and the memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ....errors import CommandLineError
from ...estimator.ds_options import (
    MICRO_BATCH,
    TOTAL_BATCH,
    accumulation_steps,
    batch_ranks,
    read_options,
)
from ...estimator.model_memory import Activations, Peak, largest_micro_batch, peak_of
from ...estimator.model_shape import ModelShape, Topology
from ...estimator.step_estimate import StepEstimate
from ...estimator.typical_model import typical_activations, typical_transformer

if TYPE_CHECKING:
    from torch import nn

_COUNT_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MOST_PARAMETERS = 10**15  # far above any model; estimates of 1e300 take minutes
_BYTE_UNITS = {
    unit: size
    for letter, power in (("K", 1), ("M", 2), ("G", 3), ("T", 4))
    for unit, size in ((f"{letter}B", 1000**power), (f"{letter}IB", 1024**power))
}
_NOT_MODELED = "not modeled with tensor or pipeline parallelism"
# Errors of code that builds a model; any other error shows its traceback.
_BUILD_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedModel:
    """Model whose training is estimated; `module` is None for a typical transformer."""

    shape: ModelShape
    module: nn.Module | None = None


def read_model(size: str | None, name: str | None) -> EstimatedModel:
    """Return the model that the options describe.

    Args:
        size: Number of parameters, such as 7B.
        name: Module and callable, such as my_project.model:build.

    Raises:
        CommandLineError: Neither or both are given, or the value is invalid.
    """
    if (size is None) == (name is None):
        raise CommandLineError(
            "give either --params, such as 7B, or --model, such as my_project.model:build"
        )
    if name is not None:
        return _build_model(name)
    return EstimatedModel(shape=typical_transformer(_num_parameters(size or "")))


def _num_parameters(size: str) -> int:
    unit = size[-1:].upper()
    digits = size[:-1] if unit in _COUNT_UNITS else size
    try:
        number = round(float(digits) * _COUNT_UNITS.get(unit, 1))
    except (ValueError, OverflowError) as error:
        raise CommandLineError(
            f"--params {size} is not a size; give it as 125M, 7B or 1e9"
        ) from error
    if number < 1000:
        raise CommandLineError(f"--params {size} is too small; give 1000 or more")
    if number > _MOST_PARAMETERS:
        raise CommandLineError(f"--params {size} is too large; give 1e15 or less")
    return number


def _build_model(name: str) -> EstimatedModel:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise CommandLineError(f"--model {name} names no callable; give it as package.module:name")
    sys.path.insert(0, "")  # where `python -m` finds modules
    with _without_arguments(module_name):
        try:
            build = getattr(import_module(module_name), attribute)
        except _BUILD_ERRORS as error:
            raise _model_error(name, "cannot be imported", error) from error
        except SystemExit as error:
            raise CommandLineError(
                f"--model {name} cannot be imported: {module_name} ends the process when it is "
                'imported; put argument parsing under `if __name__ == "__main__"`'
            ) from error
        try:
            return _call_builder(name, build)
        except SystemExit as error:
            raise CommandLineError(
                f"--model {name} ends the process when it is called; it must parse no arguments"
            ) from error


@contextmanager
def _without_arguments(name: str) -> Iterator[None]:
    """Hide the arguments of zerowatch from the user's code, which may parse its own."""
    given = sys.argv
    sys.argv = [name]
    try:
        yield
    finally:
        sys.argv = given


def _call_builder(name: str, build: Any) -> EstimatedModel:
    import torch

    from ...estimator.read_module import forward_order, read_model_shape

    try:
        with torch.device("meta"):  # no memory, and no time for random weights
            module = build()
    except _BUILD_ERRORS:
        try:
            module = build()
        except _BUILD_ERRORS as error:
            raise _model_error(name, "fails if called without arguments", error) from error
    if not isinstance(module, torch.nn.Module):
        kind = type(module).__name__
        raise CommandLineError(f"--model {name} returns a {kind}; return a torch.nn.Module")
    order = forward_order(module)  # its forward pass gives lazy layers their shapes
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise CommandLineError(
                f"--model {name} returns a model whose {key} has no shape yet; give its lazy "
                "layers their sizes, or run a forward pass before it is returned"
            )
    return EstimatedModel(shape=read_model_shape(module, order=order), module=module)


def _model_error(name: str, problem: str, error: BaseException) -> CommandLineError:
    reason = " ".join(str(error).split())
    return CommandLineError(f"--model {name} {problem}: {type(error).__name__}: {reason}; fix it")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """Command-line options on activations and memory; None where an option is not given."""

    sequence: int | None = None
    micro_batch: int | None = None
    memory: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """Micro-batches of one rank, their activations, and the device's memory.

    Attributes:
        micro_batches: Micro-batches of one step.
        samples: Samples of a micro-batch; None without --sequence.
        activations: Activations of a micro-batch; None if unknown.
        unknown: Why the activations are unknown.
        limit_bytes: Memory of the device; None without --memory.
    """

    micro_batches: int = 1
    samples: int | None = None
    activations: Activations | None = None
    unknown: str = ""
    limit_bytes: int | None = None

    @property
    def activation_bytes(self) -> int:
        """Bytes of a micro-batch's activations; 0 if unknown."""
        if self.activations is None or self.samples is None:
            return 0
        return self.activations.bytes_of(self.samples)

    def peak(self, estimate: StepEstimate) -> Peak:
        """Return the peak of a step, with activations if they are known."""
        return peak_of(
            estimate.memory,
            micro_batches=self.micro_batches,
            activations=self.activations,
            samples=self.samples or 0,
        )

    def largest(self, estimate: StepEstimate, *, recomputed: bool = False) -> int | None:
        """Return the samples of the largest micro-batch that fits; None if that is unknown.

        Args:
            estimate: The step.
            recomputed: Whether each layer is recomputed in backward.
        """
        activations = self.activations
        if recomputed and activations is not None:
            activations = activations.recomputed
        if activations is None or self.limit_bytes is None:
            return None
        return largest_micro_batch(
            estimate.memory, activations, self.limit_bytes, micro_batches=self.micro_batches
        )


def read_batch(
    given: MemoryOptions,
    config: Mapping[str, Any],
    model: EstimatedModel,
    topology: Topology,
    origin: str,
) -> RankBatch:
    """Estimate a rank's micro-batch, with its activations if --sequence is given.

    Raises:
        CommandLineError: An option is invalid.
        DsConfigError: A batch size of the configuration is invalid.
    """
    limit = _check(given)
    steps = accumulation_steps(config, topology.data_parallel, origin)
    if given.sequence is None:
        return RankBatch(micro_batches=steps, limit_bytes=limit)
    samples = given.micro_batch or _samples(config, topology, steps)
    activations, unknown = None, _NOT_MODELED
    if topology.tensor_parallel * topology.pipeline_parallel == 1:
        activations, unknown = _activations(model, config, samples, given.sequence, origin)
    return RankBatch(
        micro_batches=steps,
        samples=samples,
        activations=activations,
        unknown=unknown,
        limit_bytes=limit,
    )


def _check(given: MemoryOptions) -> int | None:
    """Check the options; return the memory in bytes, None if it is not given."""
    for option, value in (("--sequence", given.sequence), ("--micro-batch", given.micro_batch)):
        if value is not None and value < 1:
            raise CommandLineError(f"{option} is {value}; give 1 or more")
    for option, text in (("--micro-batch", given.micro_batch), ("--memory", given.memory)):
        if text is not None and given.sequence is None:
            raise CommandLineError(
                f"{option} needs --sequence, the tokens of a sample, such as --sequence 2048"
            )
    return None if given.memory is None else _num_bytes(given.memory)


def _num_bytes(text: str) -> int:
    digits = text.strip().upper()
    unit = next((unit for unit in _BYTE_UNITS if digits.endswith(unit)), None)
    try:
        number = float(digits.removesuffix(unit)) * _BYTE_UNITS[unit] if unit else math.nan
    except ValueError:
        number = math.nan
    if not 1 <= number < math.inf:
        raise CommandLineError(f"--memory {text} is not a size; give it as 80GiB or 24GB")
    return int(number)


def _samples(config: Mapping[str, Any], topology: Topology, steps: int) -> int:
    """Return the configuration's micro-batch, given or derived as DeepSpeed does."""
    samples, total = config.get(MICRO_BATCH), config.get(TOTAL_BATCH)
    if isinstance(samples, int):
        return samples
    if isinstance(total, int):
        return max(1, total // (steps * batch_ranks(config, topology.data_parallel)))
    state = "not in the configuration" if samples is None else f"{samples!r} there"
    raise CommandLineError(f"{MICRO_BATCH} is {state}; give --micro-batch")


def _activations(
    model: EstimatedModel, config: Mapping[str, Any], samples: int, tokens: int, origin: str
) -> tuple[Activations | None, str]:
    """Return the activations, or None and the reason."""
    options = read_options(config, origin=origin)
    if model.module is None:
        return typical_activations(model.shape, options, tokens), ""
    from ...estimator.trace_activations import UnknownActivationsError, trace_activations

    try:
        traced = trace_activations(
            model.module, options.model_dtype, samples=samples, tokens=tokens
        )
    except UnknownActivationsError as error:
        return None, f"a forward and backward pass on token ids fails: {error}"
    return traced, ""
