"""Makes the shape of a typical decoder of a given size, for estimates before a model exists."""

from __future__ import annotations

from .ds_options import DsOptions
from .model_memory import Activations
from .model_shape import BYTES_OF, ModelShape, ModuleShape, ParameterShape

_VOCABULARY = 32_000
_LARGEST_VOCABULARY_SHARE = 4  # in a small model the embedding has at most a quarter
# Parameters and layers of published decoders (GPT-3, arXiv 2005.14165, table 2.1).
_LAYERS = (
    (125e6, 12), (350e6, 24), (760e6, 24), (1.3e9, 24), (2.7e9, 32), (6.7e9, 32), (13e9, 40),
    (30e9, 60), (66e9, 64), (175e9, 96),
)  # fmt: skip
_WIDTH_UNIT = 64
_QKV = "attention.qkv"

# Inputs of both norms, of qkv, out, up and down (1+1+1+1+1+4), q k v (3), input of GeLU (4).
_ELEMENTS_OF_LAYER = 16
_HEAD_WIDTH = 128  # flash attention keeps an fp32 sum for each head and token
# The loss in fp32: log-probabilities, their gradient, and that of the logits (12 bytes); the
# logits themselves come on top.
_LOSS_BYTES = 3 * BYTES_OF["fp32"]


def typical_transformer(num_parameters: int) -> ModelShape:
    """Return a decoder with exactly this many parameters.

    It has as many layers as published models of that size. Each layer has 12 w^2 parameters at a
    width of w; the remainder is the embedding.
    """
    layers = min(_LAYERS, key=lambda row: abs(row[0] - num_parameters))[1]
    layers = max(1, min(layers, num_parameters // 20_000))
    width = _width(num_parameters, layers)
    shapes_of_layer = {
        _QKV: (3 * width, width),
        "attention.out": (width, width),
        "mlp.up": (4 * width, width),
        "mlp.down": (width, 4 * width),
    }
    embedding = num_parameters - layers * 12 * width * width
    parameters = [ParameterShape(name="embedding.weight", shape=(embedding,))]
    modules = [ModuleShape(name="embedding", parameters=(0,), differentiable_input=False)]
    for layer in range(layers):
        children = []
        for name, shape in shapes_of_layer.items():
            children.append(ModuleShape(name=name, parameters=(len(parameters),)))
            parameters.append(ParameterShape(name=f"layers.{layer}.{name}", shape=shape))
        modules.append(ModuleShape(name=f"layers.{layer}", children=tuple(children)))
    root = ModuleShape(name="", children=tuple(modules))
    return ModelShape(parameters=tuple(parameters), root=root, is_synthetic=True)


def _width(num_parameters: int, layers: int) -> int:
    """Return the largest width that leaves enough parameters for an embedding."""
    unit = _WIDTH_UNIT if num_parameters > 10_000_000 else 1
    width = max(1, int((num_parameters / (12 * layers)) ** 0.5) // unit * unit)
    while width > unit and num_parameters - layers * 12 * width * width < min(
        _VOCABULARY * width, num_parameters // _LARGEST_VOCABULARY_SHARE
    ):
        width -= unit
    while width > 1 and layers * 12 * width * width >= num_parameters:
        width -= 1
    return width


def typical_activations(model: ModelShape, options: DsOptions, tokens: int) -> Activations:
    """Return the activations of a decoder that `typical_transformer` made.

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models
    (arXiv 2205.05198), section 4.1: a layer keeps s b h (34 + 5 a s / h) bytes in 16 bits, for s
    tokens, b samples, width h and a heads. Two of the 34 are dropout masks, which current models
    omit. The second term is the attention matrix, which flash attention recomputes (torch's
    scaled_dot_product_attention does so where it can). That leaves 32 bytes, or 16 elements.

    Args:
        model: A typical decoder.
        options: Dtype of the model.
        tokens: Length of a sample.
    """
    qkv_widths = [p.shape[1] for p in model.parameters if p.name.endswith(_QKV)]
    width, layers = qkv_widths[0], len(qkv_widths)
    vocabulary = min(_VOCABULARY, model.parameters[0].numel // width)
    element_bytes = BYTES_OF[options.model_dtype or "fp32"]
    stream = tokens * width * element_bytes  # one value for each token and channel
    flash_sums = tokens * max(1, width // _HEAD_WIDTH) * BYTES_OF["fp32"]
    layer = _ELEMENTS_OF_LAYER * stream + flash_sums
    loss = tokens * vocabulary * (_LOSS_BYTES + element_bytes)
    ends = 2 * stream  # inputs of the last norm and of the output layer
    logits = tokens * vocabulary * element_bytes  # their gradient, from which the first follows
    # One layer at a time is complete again, with the gradient that passes through it.
    recomputed_layer = layer + 2 * stream
    recomputed = max(loss, recomputed_layer)
    return Activations(
        tokens=tokens,
        sample_bytes=layers * layer + ends + loss,
        loss_sample_bytes=loss - logits,
        recomputed=Activations(
            tokens=tokens,
            sample_bytes=layers * stream + ends + recomputed,
            loss_sample_bytes=recomputed - max(logits, recomputed_layer),
        ),
    )
