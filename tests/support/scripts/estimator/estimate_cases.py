"""A decoder and DeepSpeed configurations whose estimated memory is compared with measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

RANKS = 2


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Takes token ids and returns logits; embedding and output layer are not tied."""

    def __init__(
        self, vocabulary: int, width: int, layers: int, *, recompute: bool = False
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.layers = nn.ModuleList(Layer(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(self.norm(x))


class Adapted(nn.Module):
    """Trains the ends; the frozen layers in between have another data type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(1001, 192), nn.Linear(192, 512)
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(8))
        for layer in self.layers:
            weight = layer.weight.detach().to(dtype)
            layer.weight = nn.Parameter(weight, requires_grad=False)
        self.head = nn.Linear(512, 1001)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.first(self.words(tokens))
        for layer in self.layers:
            x = x + x * layer.weight.to(x.dtype).mean()  # backward does not need the converted one
        return self.head(x)


# Large enough for buckets and padding to matter; two ranks divide the vocabulary unevenly.
SMALL = partial(Decoder, 3001, 192, 4)
LARGE = partial(Decoder, 8003, 384, 6)
MODELS = {
    "small": SMALL,
    "large": LARGE,
    "frozen in bf16": partial(Adapted, torch.bfloat16),
    "frozen in 8 bits": partial(Adapted, torch.uint8),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration; `batch` is (samples, tokens) of a micro-batch.

    The default has so few tokens that activations are negligible. `model` replaces that of the job.
    """

    zero: Mapping[str, Any]
    model: str = ""
    dtype: str = "fp32"
    accumulation: int = 1
    batch: tuple[int, int] = (1, 4)
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ds_config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": self.batch[0],
            "gradient_accumulation_steps": self.accumulation,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": self.dtype == "bf16"},
            "zero_optimization": dict(self.zero),
            **self.config,
        }


FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
BUCKET = {"reduce_bucket_size": 500_000}
CPU = {"device": "cpu", "pin_memory": False}
OPTIMIZER_ON_CPU = {"offload_optimizer": CPU}
TIGHT = {
    **BUCKET,
    "stage3_param_persistence_threshold": 1000,
    "stage3_prefetch_bucket_size": 200_000,
    "stage3_max_reuse_distance": 300_000,
    "stage3_max_live_parameters": 900_000,
}

CASES: Mapping[str, Case] = {
    "0, fp32": Case(zero={"stage": 0}),
    "0, bf16": Case(zero={"stage": 0}, dtype="bf16", accumulation=2),
    "1, fp32": Case(zero={"stage": 1, **BUCKET}),
    "1, bf16, overlap_comm": Case(
        zero={"stage": 1, "overlap_comm": True, **BUCKET}, dtype="bf16", accumulation=2
    ),
    "1, bf16 over fp32": Case(zero={"stage": 1, **BUCKET}, dtype="bf16", config=FP32_GRADIENTS),
    "1, bf16, optimizer on cpu": Case(
        zero={"stage": 1, **OPTIMIZER_ON_CPU, **BUCKET}, dtype="bf16", accumulation=2
    ),
    "2, fp32": Case(zero={"stage": 2, **BUCKET}, accumulation=2),
    "2, bf16, not contiguous": Case(
        zero={"stage": 2, "contiguous_gradients": False, **BUCKET}, dtype="bf16", accumulation=2
    ),
    "2, bf16 over fp32, optimizer on cpu": Case(
        zero={"stage": 2, "overlap_comm": True, **OPTIMIZER_ON_CPU, **BUCKET},
        dtype="bf16",
        accumulation=2,
        config=FP32_GRADIENTS,
    ),
    "3, fp32": Case(zero={"stage": 3, **BUCKET}),
    "3, bf16 over fp32": Case(zero={"stage": 3, **TIGHT}, dtype="bf16", config=FP32_GRADIENTS),
    "3, bf16, all on cpu": Case(
        zero={"stage": 3, **OPTIMIZER_ON_CPU, "offload_param": CPU, **TIGHT},
        dtype="bf16",
        accumulation=2,
    ),
}
# Features that the bench does not measure.
FURTHER: Mapping[str, Case] = {
    "1, bf16 over fp32, immediate_grad_update": Case(
        zero={"stage": 1, **BUCKET},
        dtype="bf16",
        accumulation=2,
        config={**FP32_GRADIENTS, "bf16": {"enabled": True, "immediate_grad_update": True}},
    ),
    "2, fp32, frozen in bf16": Case(zero={"stage": 2, **BUCKET}, model="frozen in bf16"),
    "2, bf16, frozen in 8 bits": Case(
        zero={"stage": 2, **BUCKET}, dtype="bf16", model="frozen in 8 bits"
    ),
    "3, bf16, hpZ": Case(zero={"stage": 3, "zero_hpz_partition_size": 2, **TIGHT}, dtype="bf16"),
    "3, fp32, hpZ, released at once": Case(
        zero={
            "stage": 3,
            "zero_hpz_partition_size": 2,
            **TIGHT,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        },
        accumulation=2,
    ),
}
# The same with activations that matter.
WITH_ACTIVATIONS: Mapping[str, Case] = {
    "0, fp32, 4 x 256 tokens": Case(zero={"stage": 0}, batch=(4, 256)),
    "1, bf16, 4 x 256 tokens, accumulated": Case(
        zero={"stage": 1, **BUCKET}, dtype="bf16", accumulation=2, batch=(4, 256)
    ),
    "2, bf16, 4 x 256 tokens": Case(zero={"stage": 2, **BUCKET}, dtype="bf16", batch=(4, 256)),
    # The buckets are allocated while most activations exist.
    "2, bf16, overlap_comm, 1 x 256 tokens": Case(
        zero={"stage": 2, "overlap_comm": True, "reduce_bucket_size": 3_000_000},
        dtype="bf16",
        batch=(1, 256),
    ),
    "3, bf16, 4 x 256 tokens": Case(zero={"stage": 3, **TIGHT}, dtype="bf16", batch=(4, 256)),
}

# Micro-batches whose activations alone are compared: model, dtype, samples, tokens.
SHAPES: Mapping[str, tuple[partial[Decoder], str, int, int]] = {
    "fp32, 4 x 256": (SMALL, "fp32", 4, 256),
    "bf16, 4 x 256": (SMALL, "bf16", 4, 256),
    "bf16, 2 x 512, wide": (LARGE, "bf16", 2, 512),
    "fp32, 8 x 128, recomputed": (partial(SMALL, recompute=True), "fp32", 8, 128),
}
