"""Trains with compressed gradients of each format on two ranks: `FOLDER gloo|nccl`.

With gloo, two ranks may share one GPU; NCCL needs a GPU for each rank.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from gpu.jobs import engines

from zerowatch.runtime.engine.compression.compressed_all_reduce import (
    CompressedAllReduce,
    run_collective_steps,
    workspace_bytes,
)
from zerowatch.runtime.engine.compression.encoding import FORMATS
from zerowatch.runtime.engine.compression.error_feedback import CompressionError
from zerowatch.runtime.engine.compression.gradient_compressor import GradientCompressor

WIDTH, COUNT, STEPS = 64, 3, 6
NUM_VALUES = 2**25  # of a bucket
KINDS = ("fp32", "bf16", "fp16", "int8", "fp8")


def trained(stage: int, kind: str | None) -> tuple[torch.Tensor, torch.Tensor, float | None]:
    """Return the weights before and after the training, and the error ratio."""
    model = engines.layers(WIDTH, COUNT)
    # Adam divides by the size of a gradient, so that errors of small ones would weigh more.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    config = engines.ds_config(stage, reduce_bucket_size=3000)
    engine = engines.make_engine(model, config, optimizer)
    before = engines.weights(engine)
    compressor = None if kind is None else GradientCompressor(kind)
    if compressor is not None:
        compressor.attach(engine)
    data = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(STEPS):
        if compressor is not None:
            compressor.begin_window()
        engines.step(engine, torch.randn(4, WIDTH, generator=data).to(engine.device))
        if compressor is not None:
            compressor.commit_window()
    engines.synchronize()
    after = engines.weights(engine)
    ratio = None if compressor is None else compressor.error_ratio
    engines.give_up(engine)
    return before, after, ratio


def workspace(kind: str) -> dict[str, int]:
    """Return the bytes that compressing a bucket takes, as measured and as planned."""
    exchange = CompressedAllReduce(FORMATS[kind], None, CompressionError())
    planned = workspace_bytes(FORMATS[kind], NUM_VALUES, dist.get_world_size(), "cuda")
    engines.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    values, result = (torch.ones(NUM_VALUES, device=engines.device()) for _ in range(2))
    run_collective_steps(exchange.all_reduce(values, result))
    engines.synchronize()
    return {"measured": torch.cuda.max_memory_allocated() - before, "planned": planned}


def compare(stage: int) -> dict[str, Any]:
    before, expected, _ = trained(stage, None)
    found: dict[str, Any] = {}
    for kind in KINDS:
        _, actual, ratio = trained(stage, kind)
        moved = float((expected - before).norm())
        same = [torch.empty_like(actual) for _ in range(dist.get_world_size())]
        dist.all_gather(same, actual.contiguous(), group=HOST)
        found[kind] = {
            "difference": float((actual - expected).norm()) / moved,
            "ratio": ratio,
            "same on all ranks": all(torch.equal(actual, each) for each in same),
        }
    return found


if __name__ == "__main__":
    engines.meet(sys.argv[2])
    HOST = dist.new_group(backend="gloo")
    # gloo has no reduce-scatter of tensors on a GPU, which stage 3 issues.
    stages = (0, 2, 3) if sys.argv[2] == "nccl" or not engines.ON_CUDA else (0, 2)
    report: dict[str, Any] = {"training": {f"stage {stage}": compare(stage) for stage in stages}}
    if engines.ON_CUDA:
        report["workspace"] = {kind: workspace(kind) for kind in ("fp16", "int8", "fp8")}
    engines.report(report)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an ordinary exit
