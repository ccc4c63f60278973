"""Defines the demo's model: a small byte-level GPT in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

# Initial standard deviations other than 1 / sqrt(hidden_size). Blocks start as the identity, and
# the head predicts all bytes with equal probability. So the loss starts at ln(256) = 5.545 nats,
# and a high learning rate works from the start. Those of the embeddings were found by experiment.
_INITIAL_STD = {
    "attention_out": 0.0,
    "mlp_out": 0.0,
    "head": 0.0,
    "byte_embedding": 0.3,
    "position_embedding": 0.02,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig:
    """Sizes of the model, by Hugging Face's names, which the FLOPs counter reads."""

    vocab_size: int = 256
    max_position_embeddings: int = 128
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4


class Block(nn.Module):
    """Applies one pre-norm transformer layer: causal self-attention, then an MLP."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self._heads = config.num_attention_heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map activations of shape (batch, length, hidden) to the same shape."""
        x = x + self._attend(self.attention_norm(x))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x)))
        added: torch.Tensor = self.mlp_out(hidden)
        return x + added

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self._heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return out


class ByteGpt(nn.Module):
    """Predicts the next byte; its forward returns the loss, as DeepSpeed's engine expects."""

    def __init__(self, config: GptConfig | None = None) -> None:
        super().__init__()
        self.config = config or GptConfig()
        width = self.config.hidden_size
        self.byte_embedding = nn.Embedding(self.config.vocab_size, width)
        self.position_embedding = nn.Embedding(self.config.max_position_embeddings, width)
        self.blocks = nn.ModuleList(
            Block(self.config) for _ in range(self.config.num_hidden_layers)
        )
        self.final_norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, self.config.vocab_size, bias=False)
        self._initialize()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy in nats per byte.

        Args:
            input_ids: Bytes, int64 of shape (batch, length).
            labels: The byte that follows each of them, same shape.
        """
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.byte_embedding(input_ids) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.final_norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def _initialize(self) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                std = _INITIAL_STD.get(name.split(".")[-2], self.config.hidden_size**-0.5)
                nn.init.normal_(weight, std=std)
