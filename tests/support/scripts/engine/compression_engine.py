"""Small engines whose gradients can be compressed, for the scripts that check compression."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from zerowatch.runtime.engine.compression.gradient_compressor import GradientCompressor

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# DeepSpeed refuses fp16 on CPUs; torch computes it.
get_accelerator().is_fp16_supported = lambda: True
torch.set_num_threads(1)

BF16 = {"bf16": {"enabled": True}}
SUMS_IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
# 3,200 parameters in buckets of 1,500: bucket borders fall within parameters, and the parameters
# divide evenly over neither 2 nor 4 ranks.
CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 2, to each owner": {"stage": 2, "use_multi_rank_bucket_allreduce": False},
    "stage 1, to all": {"stage": 1, "reduce_scatter": False},
    "stage 2, no buckets": {"stage": 2, "contiguous_gradients": False},
    "stage 2, overlap": {"stage": 2, "overlap_comm": True},
    "stage 2, bf16": {"stage": 2},
    "stage 2, bf16, sums in fp32": {"stage": 2},
    "BF16_Optimizer": {"stage": 1},
    "stage 3": {"stage": 3},
    "stage 3, to all": {"stage": 3, "reduce_scatter": False},
}
TYPES: dict[str, dict[str, Any]] = {
    "stage 2, bf16": BF16,
    "stage 2, bf16, sums in fp32": BF16 | SUMS_IN_FP32,
    "BF16_Optimizer": BF16 | SUMS_IN_FP32,
}
WIDTH = 19


def make_engine(name: str, **config: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 53),
        torch.nn.Tanh(),
        torch.nn.Linear(53, 37),
        torch.nn.Tanh(),
        torch.nn.Linear(37, 3),
    )
    return deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "managed_gradient_accumulation": False,
            "zero_optimization": {
                "reduce_bucket_size": 1500,
                "stage3_prefetch_bucket_size": 500,
                "stage3_param_persistence_threshold": 10,
                **CASES[name],
            },
            **TYPES.get(name, {}),
            **config,
        },
    )[0]


def backward(engine: Any, step: int, scale: float = 1.0) -> None:
    """Run the two micro-batches of a window; they differ between ranks."""
    for micro_batch in range(2):
        seed = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + dist.get_rank())
        x = torch.randn(2, WIDTH, generator=seed).to(next(engine.module.parameters()).dtype)
        loss = (engine(x).float() - x[:, :3].float()).square().mean() / 2
        engine.backward(loss * scale, scale_wrt_gas=False)


def train(engine: Any, compressor: GradientCompressor | None, steps: Iterable[int]) -> None:
    for step in steps:
        if compressor is not None:
            compressor.begin_window()
        backward(engine, step)
        engine.step()
        if compressor is not None:
            compressor.commit_window()


def weights(engine: Any) -> torch.Tensor:
    """Return all weights, flat and in float32."""
    found = []
    for parameter in engine.module.parameters():
        gathered = [parameter] if hasattr(parameter, "ds_id") else []
        with deepspeed.zero.GatheredParameters(gathered, enabled=bool(gathered)):
            found.append(parameter.detach().float().flatten().clone())
    return torch.cat(found)


def same_on_all_ranks(values: torch.Tensor) -> bool:
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values)
    return all(torch.equal(values, others) for others in gathered)
