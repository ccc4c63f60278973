"""A plain DeepSpeed script with many small micro-batches, long enough for an advice."""

from __future__ import annotations

import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from zerowatch.runtime.monitor import advisor

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
advisor.MIN_SECONDS = 2.0  # half a minute is long for a test
MOST_SECONDS = 20.0
ACCUMULATION = 4
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": ACCUMULATION,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}
torch.manual_seed(0)
layers = [torch.nn.Linear(192, 192) for _ in range(4)]
engine, _, _, _ = deepspeed.initialize(model=torch.nn.Sequential(*layers), config=config)
end_at = time.monotonic() + MOST_SECONDS
while True:
    for _ in range(ACCUMULATION):
        engine.backward(engine(torch.randn(1, 192)).square().mean())
        engine.step()
    advised = any(Path("runs").glob("*/decisions.jsonl"))
    done = torch.tensor([float(advised or time.monotonic() > end_at)])
    dist.broadcast(done, 0)
    if done:
        break
