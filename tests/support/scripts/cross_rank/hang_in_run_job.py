"""Trains by a TrainingRun; rank 1 blocks in its dataset after ten steps until it may resume."""

import os
import time
from pathlib import Path

import deepspeed
import torch

import zerowatch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else compiled for a minute
RANK = int(os.environ["RANK"])
FOLDER = Path(os.environ["RANKS_FOLDER"])
BATCH, BLOCKED_SAMPLE = 8, 85  # of both ranks; a sample of rank 1's part of the eleventh batch
if RANK == 1:  # rank 0 announces the hang before rank 1 detects it
    # It reads announcements from half of that on.
    os.environ["ZEROWATCH_HANG_TIMEOUT_SECONDS"] = "14"


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 20 * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == BLOCKED_SAMPLE:
            self.block_training()
        return torch.ones(8)

    def block_training(self) -> None:
        (FOLDER / "stuck").touch()
        while not (FOLDER / "resume").exists():
            time.sleep(0.05)


run = zerowatch.TrainingRun(
    torch.nn.Linear(8, 1),
    config={
        "train_micro_batch_size_per_gpu": BATCH // 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "steps_per_print": 10**9,
    },
    loss=lambda engine, x: engine(x).square().mean(),
)
for batch in run.loader(Data(), batch_samples=BATCH, shuffle=False):
    run.train_batch(batch)
run.close()
