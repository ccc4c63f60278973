"""Describes a model and its ranks without tensors: shapes, module tree, sizes of data types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

_FLOATS: Mapping[str, int] = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
BYTES_OF: Mapping[str, int] = {
    **_FLOATS, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShape:
    """One parameter of a module, with its full shape even where ZeRO-3 has partitioned it.

    Attributes:
        group_index: Index of its param group in the optimizer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "fp32"
    requires_grad: bool = True
    group_index: int = 0

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def is_trained(self) -> bool:
        """Whether DeepSpeed's optimizers update it: it is trainable and not empty."""
        return self.requires_grad and self.numel > 0

    def dtype_in_training(self, model_dtype: str | None) -> str:
        """Return the data type to which the engine casts it; integers keep their own."""
        return model_dtype if model_dtype and self.dtype in _FLOATS else self.dtype

    def width_in_training(self, model_dtype: str | None) -> int:
        """Return the bytes of one element in that data type."""
        return BYTES_OF[self.dtype_in_training(model_dtype)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferShape:
    """One buffer of a module, such as the statistics of a batch norm.

    Attributes:
        width: Bytes of one element.
        is_float: Whether the engine casts it to the data type of training.
    """

    numel: int
    width: int
    is_float: bool = True

    def bytes_in_training(self, model_dtype: str | None) -> int:
        """Return its bytes in the engine."""
        return self.numel * (BYTES_OF[model_dtype] if model_dtype and self.is_float else self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleShape:
    """One module of the module tree, with its own parameters and its submodules.

    Attributes:
        parameters: Its own parameters, as indices into `ModelShape.parameters`.
        children: Its submodules.
        gradient_order: The order in which autograd finishes its own parameters: as registered,
            reversed, or that of a linear layer (see `parameters_by_gradient`).
        differentiable_input: False for modules that take indices, such as embeddings.
    """

    name: str
    parameters: tuple[int, ...] = ()
    children: tuple[ModuleShape, ...] = ()
    gradient_order: Literal["registered", "reversed", "linear"] = "reversed"
    differentiable_input: bool = True

    def parameters_by_gradient(self, weights_first: bool) -> tuple[int, ...]:
        """Return its own parameters in the order in which their gradients are finished."""
        as_registered = self.gradient_order == "registered" or (
            self.gradient_order == "linear" and weights_first
        )
        return self.parameters if as_registered else self.parameters[::-1]

    def walk(self) -> Iterator[ModuleShape]:
        """Yield this module and all modules below it, in the order of registration."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The parameters and the module tree of a model.

    Attributes:
        parameters: Each parameter once, in the order of `module.parameters()`.
        root: The module tree; siblings are in forward order if `order_known`.
        buffers: Each buffer once. ZeRO does not partition them.
        order_known: Whether forward order was observed; otherwise it is that of registration.
        recomputes: Whether activations are recomputed in backward; None if unknown.
        is_pipeline: Whether it is a PipelineModule of DeepSpeed; the parameters are this rank's.
        unmodeled: Features of the model that the estimate does not model, as sentences.
        unmodeled_in_stage_3: Features that the estimate of stage 3 does not model, as sentences.
        is_synthetic: Whether only the number of parameters is real, and their shapes are typical.
    """

    parameters: tuple[ParameterShape, ...]
    root: ModuleShape
    buffers: tuple[BufferShape, ...] = ()
    order_known: bool = False
    recomputes: bool | None = None
    is_pipeline: bool = False
    unmodeled: tuple[str, ...] = ()
    unmodeled_in_stage_3: tuple[str, ...] = ()
    is_synthetic: bool = False

    @property
    def num_parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def num_trained(self) -> int:
        """The number of elements of the trained parameters."""
        return sum(parameter.numel for parameter in self.parameters if parameter.is_trained)

    def param_groups(self) -> list[list[int]]:
        """Return a list of the trained parameters' indices for each param group."""
        by_group: dict[int, list[int]] = {}
        for index, parameter in enumerate(self.parameters):
            if parameter.is_trained:
                by_group.setdefault(parameter.group_index, []).append(index)
        return [by_group[group] for group in sorted(by_group)]

    def gradient_order(self, *, weights_first: bool = False) -> list[int]:
        """Return the indices of the trained parameters in the order in which backward ends them.

        A tied weight ends at its first use, which backward reaches last.

        Args:
            weights_first: Whether linear layers end the weight before the bias, as ZeRO-3's own
                do; torch's end the bias first.
        """
        by_use = [
            index
            for module in reversed(list(self.root.walk()))
            for index in module.parameters_by_gradient(weights_first)
        ]
        last_uses = list(dict.fromkeys(reversed(by_use)))
        return [index for index in reversed(last_uses) if self.parameters[index].is_trained]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The ranks: their number, the kinds of parallelism, and the communication backend."""

    world_size: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    backend: str = "nccl"

    @property
    def data_parallel(self) -> int:
        """The number of ranks that hold the same part of the model: ZeRO partitions over them."""
        return self.world_size // (self.tensor_parallel * self.pipeline_parallel)
