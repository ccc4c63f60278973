"""Trains three steps with the DeepSpeed that is installed, and prints losses and what was recorded.

`versions_job.py STAGE plain|watch|run`: without monitoring, with it, or by a TrainingRun.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import zerowatch
from zerowatch.metrics.catalog.overhead import HOOK_FAILURES

STEPS = 3
BATCH = 4

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
stage, way = int(sys.argv[1]), sys.argv[2]
config = {
    "train_micro_batch_size_per_gpu": BATCH,
    "zero_optimization": {"stage": stage},
    # torch's Adam, because DeepSpeed's own would be compiled for each release.
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
}
store = Path("store").absolute()
dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
batches = [
    torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step)) for step in range(STEPS)
]


def mean_square(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def train(engine: Any, batch: torch.Tensor) -> float:
    loss = mean_square(engine, batch)
    engine.backward(loss)
    engine.step()
    return loss.item()


def recorded(watch: Any) -> dict[str, object]:
    watch.close()
    (log,) = Path("runs").glob("*/rank-0.jsonl")
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    return {
        "steps": [step["step"] for step in steps],
        "phases": sorted(steps[-1]["phase_seconds"]),
        "collectives": sorted(steps[-1]["collectives"]),
        "hook_failures": watch.snapshot().total(HOOK_FAILURES),
    }


report: dict[str, object] = {}
if way == "run":
    run = zerowatch.TrainingRun(model, config=config, loss=mean_square)
    report["losses"] = [run.train_batch(batch).loss for batch in batches]
    report |= recorded(run.watch)
else:
    initialize = deepspeed.initialize if way == "plain" else zerowatch.initialize
    engine = initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    report["losses"] = [train(engine, batch) for batch in batches]
    if way == "watch":
        report |= recorded(engine.watch)
print(json.dumps(report))
