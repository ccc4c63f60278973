"""What the planner must know of a model, of the ranks, and of data types. No tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

BYTES_OF: Mapping[str, int] = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "uint8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShape:
    """One parameter as the module holds it: whole, even where ZeRO-3 has partitioned it.

    `group_index` is its place among the optimizer's param groups.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "fp32"
    requires_grad: bool = True
    group_index: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def trained(self) -> bool:
        """Whether DeepSpeed's optimizers own it: trainable, and not empty."""
        return self.requires_grad and self.numel > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleShape:
    """One module of the tree; its own parameters are indices into the model's.

    `gradients` says in which order autograd finishes them: as registered, reversed, or as linear
    layers do. `differentiable_input` is False for modules that take indices, such as embeddings.
    """

    name: str
    parameters: tuple[int, ...] = ()
    children: tuple[ModuleShape, ...] = ()
    gradients: Literal["registered", "reversed", "linear"] = "reversed"
    differentiable_input: bool = True

    def finished(self, weights_first: bool) -> tuple[int, ...]:
        """Return its own parameters in the order of their gradients."""
        as_registered = self.gradients == "registered" or (
            self.gradients == "linear" and weights_first
        )
        return self.parameters if as_registered else self.parameters[::-1]

    def walk(self) -> Iterator[ModuleShape]:
        """Yield this module and all below it, in the order of registration."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model as the planner sees it.

    Attributes:
        parameters: Each parameter once, in the order of `module.parameters()`.
        root: The tree of modules, in the order in which they run as far as that is known.
        order_known: Whether that order was observed; otherwise it is that of registration.
        recomputes: Whether activations are recomputed in backward; None if that is not known.
        unknowns: What of the model is not planned, in words; `stage_3_unknowns` in stage 3 only.
        invented: Whether only the total of the parameters is known and the rest is made up.
    """

    parameters: tuple[ParameterShape, ...]
    root: ModuleShape
    order_known: bool = False
    recomputes: bool | None = None
    unknowns: tuple[str, ...] = ()
    stage_3_unknowns: tuple[str, ...] = ()
    invented: bool = False

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def num_trained(self) -> int:
        """Elements of the parameters that are trained."""
        return sum(parameter.numel for parameter in self.parameters if parameter.trained)

    def groups(self) -> list[list[int]]:
        """Return the trained parameters' indices by param group, in their order."""
        by_group: dict[int, list[int]] = {}
        for index, parameter in enumerate(self.parameters):
            if parameter.trained:
                by_group.setdefault(parameter.group_index, []).append(index)
        return [by_group[group] for group in sorted(by_group)]

    def gradient_order(self, *, weights_first: bool = False) -> list[int]:
        """Return the trained parameters' indices in the order in which backward finishes them.

        A tied weight is finished where it was first used, which backward reaches last.

        Args:
            weights_first: Whether linear layers finish the weight before the bias, as ZeRO-3's own
                do; torch's finish the bias first.
        """
        finished = [
            index
            for module in reversed(list(self.root.walk()))
            for index in module.finished(weights_first)
        ]
        last_uses = list(dict.fromkeys(reversed(finished)))
        return [index for index in reversed(last_uses) if self.parameters[index].trained]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The ranks: how many, in which kinds of parallelism, and what carries their messages."""

    world_size: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    backend: str = "nccl"

    @property
    def data_parallel(self) -> int:
        """Ranks that hold the same part of the model, over which ZeRO partitions."""
        return self.world_size // (self.tensor_parallel * self.pipeline_parallel)
