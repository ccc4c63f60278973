"""Trains until it is killed, and writes each rank's process id, so that a test can kill it."""

import os
from pathlib import Path

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
model = torch.nn.Linear(8, 1)
engine, _, _, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    },
)
folder = Path(os.environ["RANKS_FOLDER"])
folder.joinpath(f"rank-{engine.global_rank}.pid").write_text(str(os.getpid()))
while True:
    engine.backward(engine(torch.ones(4, 8)).square().mean())
    engine.step()
