"""Trains, with the folder of run folders in the ds config, until SIGKILL ends rank 1."""

import os
import signal
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
model = torch.nn.Linear(8, 1)
engine, _, _, _ = deepspeed.initialize(
    model=model,
    model_parameters=list(model.parameters()),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
        "zerowatch": {"run_log": {"folder": "shared"}},
    },
)
while True:
    engine.backward(engine(torch.ones(4, 8)).square().mean())
    engine.step()
    has_marker = torch.tensor(
        [float(bool(list(Path("shared").glob(f"*/rank-{engine.global_rank}.alive.json"))))]
    )
    dist.all_reduce(has_marker, dist.ReduceOp.MIN)
    if engine.global_steps >= 20 and has_marker and engine.global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
