"""What one micro-batch's activations take at their fullest, as backward begins. Pure.

Source of the formula: Korthikanti et al., Reducing Activation Recomputation in Large Transformer
Models (arXiv 2205.05198), section 4.1: a layer keeps s b h (34 + 5 a s / h) bytes in 16 bits, with
s tokens, b samples, h width and a heads. Two of the 34 are masks of dropout, which today's models
leave out; the second term is the matrix of attention, which flash attention works out again
(torch's scaled_dot_product_attention does so where it can). That leaves 32, or 16 elements.
"""

from __future__ import annotations

from dataclasses import dataclass

from .options import Options
from .shapes import BYTES_OF, ModelShape

# Inputs of both norms, of qkv, out, up and down (1+1+1+1+1+4), q k v (3), input of GeLU (4).
_ELEMENTS_OF_LAYER = 16
_HEAD_WIDTH = 128  # flash attention keeps an fp32 sum for each head and token
_VOCABULARY = 32_000  # of a typical model; its embedding takes what rounding leaves over
# The loss in fp32: log-probabilities, their gradient, and that of the logits (12 bytes); the
# logits themselves beside them.
_LOSS_BYTES = 3 * BYTES_OF["fp32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """What a micro-batch of samples of `tokens` each keeps for backward, at its fullest.

    It grows in proportion to the samples: `fixed_bytes` do not. `recomputed_sample_bytes` is a
    sample's where each layer is recomputed in backward; None if that was not worked out.
    """

    tokens: int
    sample_bytes: int
    fixed_bytes: int = 0
    recomputed_sample_bytes: int | None = None

    def bytes_of(self, samples: int) -> int:
        """Return the bytes of a micro-batch of so many samples."""
        return self.fixed_bytes + samples * self.sample_bytes


def typical_activations(model: ModelShape, options: Options, tokens: int) -> Activations:
    """Return those of a typical transformer, as `typical_transformer` makes them.

    Args:
        model: Such a model.
        options: Tells its data type, and whether layers are recomputed.
        tokens: Length of a sample.
    """
    qkv = [p.shape[1] for p in model.parameters if p.name.endswith("attention.qkv")]
    width, layers = qkv[0], len(qkv)
    vocabulary = min(_VOCABULARY, model.parameters[0].numel // width)
    element = BYTES_OF[options.model_dtype or "fp32"]
    stream = tokens * width * element  # one value for each token and channel
    layer = _ELEMENTS_OF_LAYER * stream + tokens * max(1, width // _HEAD_WIDTH) * BYTES_OF["fp32"]
    loss = tokens * vocabulary * (_LOSS_BYTES + element)
    ends = 2 * stream  # inputs of the last norm and of the output layer
    whole = layers * layer + ends + loss
    # One layer at a time is whole again, with the gradient that goes through it.
    recomputed = layers * stream + ends + max(loss, layer + 2 * stream)
    return Activations(
        tokens=tokens,
        sample_bytes=recomputed if options.activation_checkpointing else whole,
        recomputed_sample_bytes=recomputed,
    )
