"""Trains on and on; told to, rank 1 stands still after ten steps until it is let go on."""

import os
import time
from pathlib import Path

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else compiled for a minute
RANK = int(os.environ["RANK"])
FOLDER = Path(os.environ["RANKS_FOLDER"])
STANDS_STILL = os.environ.get("RANK_1_STANDS_STILL") == "yes"
if STANDS_STILL and RANK == 1:  # it shall not find its own hang, but be told by rank 0
    os.environ["ZEROWATCH_HANG_SECONDS"] = "30"  # it listens from half of that on


def stand_still() -> None:
    (FOLDER / "stands-still").touch()
    while not (FOLDER / "go-on").exists():
        time.sleep(0.05)


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
(FOLDER / f"rank-{RANK}.pid").write_text(str(os.getpid()))
while not STANDS_STILL or engine.global_steps < 20:
    if STANDS_STILL and RANK == 1 and engine.global_steps == 10:
        stand_still()
    engine.backward(engine(torch.ones(4, 8)).square().mean())
    engine.step()
