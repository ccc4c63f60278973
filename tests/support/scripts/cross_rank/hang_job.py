"""Trains until killed.

With RANK_1_IS_STUCK, rank 1 blocks after ten steps until it may resume. If there is a file `stop`,
rank 1 stops itself between two steps: a signal from outside could stop it within a collective.
"""

import os
import signal
import time
from pathlib import Path

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else compiled for a minute
RANK = int(os.environ["RANK"])
FOLDER = Path(os.environ["RANKS_FOLDER"])
IS_STUCK = os.environ.get("RANK_1_IS_STUCK") == "yes"
if IS_STUCK and RANK == 1:  # rank 0 announces the hang before rank 1 detects it
    # It reads announcements from half of that on.
    os.environ["ZEROWATCH_HANG_TIMEOUT_SECONDS"] = "14"


def block_training() -> None:
    (FOLDER / "stuck").touch()
    while not (FOLDER / "resume").exists():
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
while not IS_STUCK or engine.global_steps < 20:
    if IS_STUCK and RANK == 1 and engine.global_steps == 10:
        block_training()
    if RANK == 1 and (FOLDER / "stop").exists():
        os.kill(os.getpid(), signal.SIGSTOP)
    engine.backward(engine(torch.ones(4, 8)).square().mean())
    engine.step()
