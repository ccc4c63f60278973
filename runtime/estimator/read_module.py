"""Reads a torch module as a `ModelShape`: parameters, buffers, module tree, forward order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from .model_shape import BYTES_OF, BufferShape, ModelShape, ModuleShape, ParameterShape

_DTYPE_NAMES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
# Containers whose own forward never runs, so that none of their hooks do.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_INDEX_INPUT = (nn.Embedding, nn.EmbeddingBag)
# Autograd finishes the weight's gradient before the bias's here; in linear layers after it.
_WEIGHT_FIRST = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.conv._ConvNd,
)
# Modules that DeepSpeed treats as one unit in ZeRO-3 (runtime/zero/leaf_module_config.py).
_LEAF_MODULES = ("MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock")
_PIPELINES = ("deepspeed.runtime.pipe.module.PipelineModule",)
# Layers that DeepSpeed's engine finds by their class (engine.py:2102).
_EXPERT_LAYERS = (
    "deepspeed.moe.layer.MoE",
    "deepspeed.module_inject.auto_ep_layer.AutoEPMoELayer",
)
# Errors of a forward pass on the meta device, where tensors have no values.
_FORWARD_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def read_model_shape(
    module: nn.Module,
    param_groups: Iterable[Mapping[str, Any]] = (),
    order: Sequence[str] | None = None,
) -> ModelShape:
    """Return the shape of a module on any device, partitioned by ZeRO-3 or not.

    Args:
        module: The model as passed to deepspeed.initialize.
        param_groups: The optimizer's groups before DeepSpeed flattened them; empty for one group.
        order: Name of the module of each call in forward, in that order; None if unknown.
    """
    group_of = {id(p): number for number, g in enumerate(param_groups) for p in g["params"]}
    parameters = dict(module.named_parameters())
    indices = {id(parameter): index for index, parameter in enumerate(parameters.values())}
    recomputes = any(getattr(inner, "gradient_checkpointing", False) for inner in module.modules())
    return ModelShape(
        parameters=tuple(
            ParameterShape(
                name=name,
                shape=tuple(getattr(parameter, "ds_shape", parameter.shape)),
                dtype=_dtype_name(parameter.dtype),
                requires_grad=parameter.requires_grad,
                group_index=group_of.get(id(parameter), 0),
            )
            for name, parameter in parameters.items()
        ),
        root=_TreeReader(indices, order).read("", module),
        buffers=tuple(
            BufferShape(
                numel=buffer.numel(),
                width=buffer.element_size(),
                is_float=buffer.is_floating_point(),
            )
            for buffer in module.buffers()
            if not nn.parameter.is_lazy(buffer)  # it has no size before the first forward
        ),
        order_known=order is not None,
        recomputes=recomputes or None,
        is_pipeline=_is_instance(module, _PIPELINES),
        unmodeled=tuple(_unmodeled(module)),
        unmodeled_in_stage_3=tuple(_unmodeled_in_stage_3(module, order or ())),
    )


def _dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a data type, a key of `BYTES_OF`; fp32 for rare ones."""
    name = str(dtype).removeprefix("torch.")
    if name.startswith("float8"):
        return "fp8"
    return _DTYPE_NAMES.get(name, name if name in BYTES_OF else "fp32")


class _TreeReader:
    """Reads the tree of modules that forward calls, in forward order if that is known."""

    def __init__(self, indices: Mapping[int, int], order: Sequence[str] | None) -> None:
        self._indices = indices
        self._positions = (  # of the first calls
            None
            if order is None
            else {name: position for position, name in enumerate(dict.fromkeys(order))}
        )

    def read(self, name: str, module: nn.Module) -> ModuleShape:
        children = [self.read(*child) for child in self._children(name, module, called=True)]
        if self._positions is not None:
            positions = self._positions
            children.sort(key=lambda child: positions[child.name])
        own = list(module.parameters(recurse=False))
        for _, child in self._children(name, module, called=False):
            own += child.parameters(recurse=False)  # presumably used by this module
        return ModuleShape(
            name=name,
            parameters=tuple(self._indices[id(parameter)] for parameter in own),
            children=tuple(children),
            gradient_order=_gradient_order(module),
            differentiable_input=not isinstance(module, _INDEX_INPUT),
        )

    def _children(
        self, name: str, module: nn.Module, *, called: bool
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the nearest descendants that are called, or the uncalled ones between them."""
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
        if self._positions is None:
            return not isinstance(module, _CONTAINERS)
        return name in self._positions


def _gradient_order(module: nn.Module) -> Literal["registered", "reversed", "linear"]:
    if isinstance(module, nn.Linear):
        return "linear"
    return "registered" if isinstance(module, _WEIGHT_FIRST) else "reversed"


def _unmodeled(module: nn.Module) -> Iterator[str]:
    if any(isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse for m in module.modules()):
        yield "gradients of sparse embeddings are counted as dense"
    if any(_is_instance(m, _EXPERT_LAYERS) for m in module.modules()):
        yield "mixtures of experts are not modeled"


def _is_instance(module: nn.Module, classes: Sequence[str]) -> bool:
    """Return whether a module has one of these classes, given by name: DeepSpeed loads slowly."""
    bases = type(module).__mro__
    return any(f"{base.__module__}.{base.__name__}" in classes for base in bases)


def _unmodeled_in_stage_3(module: nn.Module, order: Sequence[str]) -> Iterator[str]:
    """Yield the features of a model that ZeRO-3 handles in ways that are not modeled."""
    modules = list(module.modules())
    calls = Counter(order)
    if any(calls[name] > 1 and _has_parameters(m) for name, m in module.named_modules()):
        yield "a module with parameters runs several times, and is counted once"
    if any(isinstance(m, nn.MultiheadAttention) for m in modules):
        yield "MultiheadAttention uses its out_proj without calling it"
    if any(isinstance(m, nn.ParameterList | nn.ParameterDict) for m in modules):
        yield "parameters in a ParameterList or ParameterDict are used by other modules"
    if any(type(m).__name__ in _LEAF_MODULES for m in modules):
        yield "mixture-of-experts blocks are gathered as one unit"


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def forward_order(module: nn.Module) -> tuple[str, ...] | None:
    """Return the name of the module of each call in forward, in that order.

    The module must be on the meta device, where forward computes nothing. It must also have
    example inputs, as the models of Hugging Face do in `dummy_inputs`.

    Returns:
        None if either is not the case, or if forward needs values.
    """
    inputs = _example_inputs(module)
    if inputs is None or not all(p.is_meta for p in module.parameters()):
        return None
    called: list[str] = []
    hooks = [
        inner.register_forward_pre_hook(lambda _module, _inputs, name=name: called.append(name))
        for name, inner in module.named_modules()
    ]
    try:
        module.eval()(**inputs)  # eval: layer dropout must not skip modules
    except _FORWARD_ERRORS:
        return None
    finally:
        module.train()
        for hook in hooks:
            hook.remove()
    return tuple(called)


def _example_inputs(module: nn.Module) -> Mapping[str, torch.Tensor] | None:
    inputs = getattr(module, "dummy_inputs", None)
    if not isinstance(inputs, Mapping):
        return None
    return {name: value.to("meta") for name, value in inputs.items() if torch.is_tensor(value)}
