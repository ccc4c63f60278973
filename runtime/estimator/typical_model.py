"""A plausible transformer of a given size, for plans before there is a model."""

from __future__ import annotations

from .shapes import ModelShape, ModuleShape, ParameterShape

_VOCABULARY = 32_000
_LARGEST_VOCABULARY_SHARE = 4  # of a small model the embedding takes at most a quarter
# Layers and width of published decoders (GPT-3, arXiv 2005.14165, table 2.1), by parameters.
_LAYERS = (
    (125e6, 12), (350e6, 24), (760e6, 24), (1.3e9, 24), (2.7e9, 32), (6.7e9, 32), (13e9, 40),
    (30e9, 60), (66e9, 64), (175e9, 96),
)  # fmt: skip
_WIDTH_UNIT = 64


def typical_transformer(num_parameters: int) -> ModelShape:
    """Return a decoder of exactly this many parameters.

    Layers are as many as in published models of about the size; each has 12 w^2 parameters for a
    width of w. What rounding leaves over goes into the embedding.
    """
    layers = min(_LAYERS, key=lambda row: abs(row[0] - num_parameters))[1]
    layers = max(1, min(layers, num_parameters // 20_000))
    width = _width(num_parameters, layers)
    per_layer = {
        "attention.qkv": (3 * width, width),
        "attention.out": (width, width),
        "mlp.up": (4 * width, width),
        "mlp.down": (width, 4 * width),
    }
    left = num_parameters - layers * 12 * width * width
    parameters = [ParameterShape(name="embedding.weight", shape=(left,))]
    modules = [ModuleShape(name="embedding", parameters=(0,), differentiable_input=False)]
    for layer in range(layers):
        children = []
        for name, shape in per_layer.items():
            children.append(ModuleShape(name=name, parameters=(len(parameters),)))
            parameters.append(ParameterShape(name=f"layers.{layer}.{name}", shape=shape))
        modules.append(ModuleShape(name=f"layers.{layer}", children=tuple(children)))
    root = ModuleShape(name="", children=tuple(modules))
    return ModelShape(parameters=tuple(parameters), root=root, invented=True)


def _width(num_parameters: int, layers: int) -> int:
    """Return the largest width that leaves room for an embedding."""
    unit = _WIDTH_UNIT if num_parameters > 10_000_000 else 1
    width = max(1, int((num_parameters / (12 * layers)) ** 0.5) // unit * unit)
    while width > unit and num_parameters - layers * 12 * width * width < min(
        _VOCABULARY * width, num_parameters // _LARGEST_VOCABULARY_SHARE
    ):
        width -= unit
    while width > 1 and layers * 12 * width * width >= num_parameters:
        width -= 1
    return width
