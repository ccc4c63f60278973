"""Engines and models of the jobs of `tests/gpu/`, on the accelerator of DS_ACCELERATOR."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from zerowatch.metrics.catalog.overhead import HOOK_FAILURES

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

ON_CUDA = os.environ["DS_ACCELERATOR"] == "cuda"
# Monitoring without a server, for jobs that read their own figures.
QUIET: dict[str, Any] = {"serve": {"enabled": False}, "run_log": {"enabled": False}}


def meet(backend: str | None = None) -> None:
    """Join the process group: NCCL on a GPU."""
    if ON_CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(backend or ("nccl" if ON_CUDA else "gloo"), verbose=False)


def device() -> torch.device:
    return torch.device(get_accelerator().current_device_name() if ON_CUDA else "cpu")


def layers(width: int, count: int) -> torch.nn.Module:
    torch.manual_seed(0)
    parts: list[torch.nn.Module] = []
    for _ in range(count):
        parts += [torch.nn.Linear(width, width), torch.nn.LayerNorm(width), torch.nn.GELU()]
    return torch.nn.Sequential(*parts)


def ds_config(stage: int, *, bf16: bool = False, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000_000, **zero},
        # Otherwise DeepSpeed's own timer synchronizes in each step.
        "timers": {"throughput": {"enabled": False}},
        **({"bf16": {"enabled": True}} if bf16 else {}),
    }


def make_engine(model: torch.nn.Module, config: dict[str, Any], optimizer: Any = None) -> Any:
    """Return an engine, by default with torch's AdamW, which needs no compiler."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def step(engine: Any, batch: torch.Tensor) -> torch.Tensor:
    """Train one step; return the loss, which is not read."""
    loss = engine(batch).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss


def weights(engine: Any) -> torch.Tensor:
    """Return all weights in host memory, flat and in float32."""
    whole = []
    for parameter in engine.module.parameters():
        gathered = [parameter] if hasattr(parameter, "ds_id") else []
        with deepspeed.zero.GatheredParameters(gathered, enabled=bool(gathered)):
            whole.append(parameter.detach().float().flatten().cpu().clone())
    return torch.cat(whole)


def contexts() -> list[int]:
    """Return the GPUs on which this process has a context, by torch's index."""
    if not ON_CUDA:
        return []
    has_context = torch._C._cuda_hasPrimaryContext
    return [index for index in range(torch.cuda.device_count()) if has_context(index)]


def give_up(engine: Any) -> None:
    """Free the memory of an engine."""
    engine.destroy()
    deepspeed.runtime.zero.parameter_offload.FWD_MODULE_STACK.clear()
    gc.collect()
    get_accelerator().empty_cache()


def hook_failures(watch: Any) -> dict[str, float]:
    """Return how often each hook of monitoring has failed."""
    failures = watch.snapshot().values.get(HOOK_FAILURES, {})
    return {" ".join(labels): value for labels, value in failures.items() if value}


def synchronize() -> None:
    get_accelerator().synchronize()


def report(found: object) -> None:
    """Write what this rank has found to FOLDER/rank-r.json, and leave the group."""
    Path(sys.argv[1], f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
