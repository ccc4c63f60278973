"""Models and DeepSpeed configurations whose estimates are compared with measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

WIDTH, VOCABULARY, TOKENS = 12, 37, 5


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.relu(self.up(self.norm(x)))))


class Deep(nn.Module):
    """Layers of several sizes, on floating-point input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH + 1)
        self.blocks = nn.ModuleList(Block(WIDTH + 1, 7 * n + 3) for n in range(1, 5))
        self.norm = nn.LayerNorm(WIDTH + 1)
        self.last = nn.Linear(WIDTH + 1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.unflatten(-1, (TOKENS, WIDTH)))
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x)).square().mean()


class Tied(nn.Module):
    """A small language model whose output layer shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, 2 * WIDTH) for _ in range(3)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x[:, :TOKENS].abs().mul(10).long() % VOCABULARY
        hidden = self.words(ids) + self.places(torch.arange(TOKENS))
        logits = self.head(self.blocks(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


class NormLast(nn.Module):
    """Runs its modules in another order than it registers them, as Llama's layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 3)
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block(WIDTH, 4 * n) for n in (5, 1, 3))
        self.norm = nn.LayerNorm(WIDTH)

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(1, TOKENS * WIDTH)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x.unflatten(-1, (TOKENS, WIDTH)))
        for block in reversed(self.blocks):
            x = block(x)
        return self.last(self.inner(x)).square().mean()


def norm_last() -> nn.Module:
    return NormLast()


def deep() -> nn.Module:
    return Deep()


def tied() -> nn.Module:
    return Tied()


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(3))


def frozen() -> nn.Module:
    model = Deep()
    for part in (model.first, model.blocks[0], model.blocks[2]):
        part.requires_grad_(False)
    return model


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "deep": deep,
    "frozen": frozen,
    "norm_last": norm_last,
    "tied": tied,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    zero: Mapping[str, Any]
    model: str = "deep"
    accumulation: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)
    groups: bool = False
    ranks: tuple[int, ...] = (2, 4)

    @property
    def ds_config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": dict(self.zero),
            **self.config,
        }


def param_groups(model: nn.Module, split: bool) -> list[dict[str, Any]]:
    """Return one group, or weights apart from the rest as for weight decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not split:
        return [{"params": trained}]
    matrices = [p for p in trained if p.dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]


SMALL = {"reduce_bucket_size": 300}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
CLIP = {"gradient_clipping": 1.0}
BF16_OVER_FP32 = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
CPU = {"device": "cpu", "pin_memory": False}
NO_PERSISTENCE = {"stage3_param_persistence_threshold": 0}
SOME_PERSISTENCE = {"stage3_param_persistence_threshold": 40}
TIGHT = {
    "stage3_prefetch_bucket_size": 250,
    "stage3_max_reuse_distance": 400,
    "stage3_max_live_parameters": 700,
    **SOME_PERSISTENCE,
}

CASES: Mapping[str, Case] = {
    "0": Case(zero={"stage": 0}, accumulation=2),
    "0, not clipped": Case(zero={"stage": 0}, config={"gradient_clipping": 0}, ranks=(2,)),
    "0, bf16": Case(zero={"stage": 0}, config=BF16 | CLIP, ranks=(2,)),
    "0, fp16": Case(zero={"stage": 0}, config=FP16, ranks=(2,)),
    "0, frozen": Case(zero={"stage": 0}, model="frozen", ranks=(2,)),
    "1": Case(zero={"stage": 1}, accumulation=2),
    "1, small buckets": Case(zero={"stage": 1, **SMALL}, config=CLIP, ranks=(2,)),
    "1, overlap": Case(zero={"stage": 1, "overlap_comm": True, **SMALL}, accumulation=2),
    "1, reduce per owner": Case(
        zero={"stage": 1, "use_multi_rank_bucket_allreduce": False, **SMALL}, accumulation=2
    ),
    "1, no reduce_scatter": Case(zero={"stage": 1, "reduce_scatter": False, **SMALL}, ranks=(2,)),
    "1, bf16": Case(zero={"stage": 1, **SMALL}, config=BF16, ranks=(2,)),
    "1, bf16 over fp32": Case(
        zero={"stage": 1, **SMALL}, config=BF16_OVER_FP32, accumulation=2, ranks=(2,)
    ),
    "1, fp16": Case(zero={"stage": 1, **SMALL}, config=FP16, ranks=(2,)),
    "1, two groups": Case(zero={"stage": 1, **SMALL}, groups=True, ranks=(2,)),
    "1, on cpu": Case(
        zero={"stage": 1, "offload_optimizer": CPU}, config=BF16_OVER_FP32, ranks=(2,)
    ),
    "2": Case(zero={"stage": 2}, accumulation=2, ranks=(2,)),
    "2, small buckets": Case(zero={"stage": 2, **SMALL}, accumulation=2, config=CLIP),
    "2, tiny buckets": Case(zero={"stage": 2, "reduce_bucket_size": 90}),
    "2, reduce per owner": Case(
        zero={"stage": 2, "use_multi_rank_bucket_allreduce": False, **SMALL}, accumulation=2
    ),
    "2, reduce per owner, tiny": Case(
        zero={
            "stage": 2,
            "use_multi_rank_bucket_allreduce": False,
            "reduce_bucket_size": 90,
            "overlap_comm": True,
        },
    ),
    "2, no reduce_scatter": Case(zero={"stage": 2, "reduce_scatter": False, **SMALL}, ranks=(2,)),
    "2, not contiguous": Case(
        zero={"stage": 2, "contiguous_gradients": False, **SMALL}, ranks=(2,)
    ),
    "2, round robin": Case(
        zero={
            "stage": 2,
            "round_robin_gradients": True,
            "use_multi_rank_bucket_allreduce": False,
            **SMALL,
        },
    ),
    "2, aligned": Case(
        zero={"stage": 2, "parameter_alignment": True, **SMALL}, config=BF16, ranks=(2,)
    ),
    "2, no norm": Case(
        zero={"stage": 2, "compute_grad_norm": False},
        config=BF16 | {"gradient_clipping": 0},
        ranks=(2,),
    ),
    "2, sent as bf16": Case(
        zero={"stage": 2, **SMALL}, config={"communication_data_type": "bf16"}, ranks=(2,)
    ),
    "2, bf16": Case(zero={"stage": 2, **SMALL}, config=BF16_OVER_FP32, accumulation=2, ranks=(2,)),
    "2, on cpu": Case(
        zero={"stage": 2, "offload_optimizer": CPU, **SMALL}, accumulation=2, ranks=(2,)
    ),
    "2, tied": Case(zero={"stage": 2, **SMALL}, model="tied", ranks=(2,)),
    "2, frozen": Case(zero={"stage": 2, **SMALL}, model="frozen"),
    "2, run order": Case(zero={"stage": 2, **SMALL}, model="norm_last", ranks=(2,)),
    "2, two groups": Case(zero={"stage": 2, **SMALL}, groups=True, accumulation=2),
    "3": Case(zero={"stage": 3}, accumulation=2),
    "3, none persistent": Case(zero={"stage": 3, **NO_PERSISTENCE}, accumulation=2),
    "3, some persistent": Case(
        zero={"stage": 3, **SOME_PERSISTENCE, **SMALL}, config=CLIP, ranks=(2,)
    ),
    "3, tight": Case(zero={"stage": 3, **TIGHT, **SMALL}, accumulation=2),
    "3, no prefetch": Case(
        zero={"stage": 3, **TIGHT, "stage3_prefetch_bucket_size": 0}, accumulation=2
    ),
    "3, no reuse": Case(
        zero={"stage": 3, **NO_PERSISTENCE, "stage3_max_reuse_distance": 0}, ranks=(2,)
    ),
    "3, no reduce_scatter": Case(
        zero={"stage": 3, "reduce_scatter": False, **SMALL, **NO_PERSISTENCE},
        ranks=(2,),
    ),
    "3, torch's linear": Case(
        zero={"stage": 3, "memory_efficient_linear": False, **SMALL, **TIGHT}, ranks=(2,)
    ),
    "3, sequential": Case(
        # The limit of live parameters allows more to be prefetched than DeepSpeed then does.
        zero={
            "stage": 3,
            "stage3_allgather_sequential": True,
            **TIGHT,
            "stage3_max_live_parameters": 5000,
        },
        ranks=(2,),
    ),
    "3, fetch by all_reduce": Case(
        zero={"stage": 3, "stage3_use_all_reduce_for_fetch_params": True, **TIGHT}, ranks=(2,)
    ),
    "3, sub-groups": Case(zero={"stage": 3, "sub_group_size": 200, **TIGHT}, ranks=(2,)),
    "3, bf16": Case(zero={"stage": 3, **TIGHT}, config=BF16_OVER_FP32, accumulation=2),
    "3, fp16": Case(zero={"stage": 3, **TIGHT}, config=FP16, ranks=(2,)),
    "3, tied": Case(zero={"stage": 3, **TIGHT, **SMALL}, model="tied", accumulation=2),
    "3, frozen": Case(zero={"stage": 3, **TIGHT, **SMALL}, model="frozen", accumulation=2),
    "3, run order": Case(zero={"stage": 3, **TIGHT, **SMALL}, model="norm_last", ranks=(2,)),
    "3, two groups": Case(zero={"stage": 3, **SOME_PERSISTENCE}, groups=True, ranks=(2,)),
    "3, all on cpu": Case(
        zero={"stage": 3, "offload_optimizer": CPU, "offload_param": CPU, **TIGHT},
        accumulation=2,
        ranks=(2,),
    ),
    "3, hpZ": Case(
        zero={"stage": 3, "zero_hpz_partition_size": 2, **TIGHT}, accumulation=2, ranks=(4,)
    ),
    "3, hpZ, frozen": Case(
        zero={"stage": 3, "zero_hpz_partition_size": 2, **NO_PERSISTENCE},
        model="frozen",
        accumulation=2,
        ranks=(4,),
    ),
}
