"""Trains three windows with a TrainingRun, and prints how its watch was built."""

from __future__ import annotations

import json

import deepspeed
import torch

import zerowatch
from zerowatch.metrics.catalog import training

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo", verbose=False)
torch.manual_seed(0)


model = torch.nn.Linear(8, 1)
run = zerowatch.TrainingRun(
    model,
    config={
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    },
    optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
    loss=lambda model, batch: model(batch).square().mean(),
    settings={"serve": {"enabled": False}, "console": "off"},
)
for _ in range(3):
    run.train_batch(torch.ones(4, 8))
run.close()
watch = run.watch
print(
    json.dumps(
        {
            "steps": watch.snapshot().value(training.STEPS),
            "separate": watch.settings.process.separate,
        }
    )
)
