"""Trains with DDP, without DeepSpeed. Rank 1 blocks after ten steps until it may resume."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
FOLDER = Path(os.environ["RANKS_FOLDER"])
if RANK == 1:  # rank 0 announces the hang before rank 1 detects it
    # It reads announcements from half of that on.
    os.environ["ZEROWATCH_HANG_TIMEOUT_SECONDS"] = "14"


def block_training() -> None:
    (FOLDER / "stuck").touch()
    while not (FOLDER / "resume").exists():
        time.sleep(0.05)


dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    if RANK == 1 and step == 10:
        block_training()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
