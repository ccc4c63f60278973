"""Reads the shape of a torch module: its parameters, and the tree of modules that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from .shapes import ModelShape, ModuleShape, ParameterShape

_NAMES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
# Containers whose own forward never runs, so that no hook of theirs does.
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_TAKE_INDICES = (nn.Embedding, nn.EmbeddingBag)
# Autograd hands over the weight's gradient before the bias's here; in linear layers after it.
_WEIGHT_FIRST = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.conv._ConvNd,
)
# DeepSpeed treats these as one piece in ZeRO-3 (runtime/zero/leaf_module_config.py).
_LEAVES = ("MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock")


def shape_of(
    module: nn.Module,
    param_groups: Iterable[Mapping[str, Any]] = (),
    order: Sequence[str] | None = None,
) -> ModelShape:
    """Read a module, on any device, partitioned by ZeRO-3 or not.

    Args:
        module: The model as given to deepspeed.initialize.
        param_groups: The optimizer's, before DeepSpeed flattened them; none for a single one.
        order: Names of the modules that forward calls, in that order; None if it is not known.
    """
    places = {id(p): place for place, g in enumerate(param_groups) for p in g["params"]}
    parameters = dict(module.named_parameters())
    numbers = {id(parameter): number for number, parameter in enumerate(parameters.values())}
    recomputes = any(getattr(inner, "gradient_checkpointing", False) for inner in module.modules())
    return ModelShape(
        parameters=tuple(
            ParameterShape(
                name=name,
                shape=tuple(getattr(parameter, "ds_shape", parameter.shape)),
                dtype=_NAMES.get(str(parameter.dtype).removeprefix("torch."), "fp32"),
                requires_grad=parameter.requires_grad,
                group_index=places.get(id(parameter), 0),
            )
            for name, parameter in parameters.items()
        ),
        root=_Tree(numbers, order).of("", module),
        order_known=order is not None,
        recomputes=recomputes or None,
        unknowns=tuple(_unknowns(module)),
        stage_3_unknowns=tuple(_stage_3_unknowns(module)),
    )


class _Tree:
    """Builds the tree of modules that are called, in the order of their calls if it is known."""

    def __init__(self, numbers: Mapping[int, int], order: Sequence[str] | None) -> None:
        self._numbers = numbers
        self._places = None if order is None else {name: place for place, name in enumerate(order)}

    def of(self, name: str, module: nn.Module) -> ModuleShape:
        children = [self.of(*child) for child in self._children(name, module, called=True)]
        if self._places is not None:
            places = self._places
            children.sort(key=lambda child: places[child.name])
        own = list(module.parameters(recurse=False))
        for _, child in self._children(name, module, called=False):
            own += child.parameters(recurse=False)  # used by this module, as far as one can tell
        return ModuleShape(
            name=name,
            parameters=tuple(self._numbers[id(parameter)] for parameter in own),
            children=tuple(children),
            gradients=_gradients(module),
            differentiable_input=not isinstance(module, _TAKE_INDICES),
        )

    def _children(
        self, name: str, module: nn.Module, *, called: bool
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the nearest modules below that are called, or those on the way that are not."""
        for child_name, child in module.named_children():
            full_name = f"{name}.{child_name}".lstrip(".")
            if self._is_called(full_name, child):
                if called:
                    yield full_name, child
                continue
            if not called:
                yield full_name, child
            yield from self._children(full_name, child, called=called)

    def _is_called(self, name: str, module: nn.Module) -> bool:
        if self._places is None:
            return not isinstance(module, _LISTS)
        return name in self._places


def _gradients(module: nn.Module) -> Literal["registered", "reversed", "linear"]:
    if isinstance(module, nn.Linear):
        return "linear"
    return "registered" if isinstance(module, _WEIGHT_FIRST) else "reversed"


def _unknowns(module: nn.Module) -> Iterator[str]:
    if any(isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse for m in module.modules()):
        yield "gradients of sparse embeddings are counted as dense"


def _stage_3_unknowns(module: nn.Module) -> Iterator[str]:
    """Say what of the model ZeRO-3 handles in ways that are not planned."""
    inner = list(module.modules())
    if any(isinstance(m, nn.MultiheadAttention) for m in inner):
        yield "MultiheadAttention uses its out_proj without calling it"
    if any(isinstance(m, nn.ParameterList | nn.ParameterDict) for m in inner):
        yield "parameters in a ParameterList or ParameterDict are used by other modules"
    if any(type(m).__name__ in _LEAVES for m in inner):
        yield "mixture-of-experts blocks are gathered as one piece"
