"""Trains twenty steps without waiting for the device, then reads an embedding outside its table.

On CUDA that is a device-side assert: from then on, each call of CUDA raises. On CPU it is an
IndexError. The script does not catch it.
"""

from __future__ import annotations

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

import zerowatch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else compiled for a minute

STEPS, ROWS = 20, 64


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(ROWS, 32)
        self.head = torch.nn.Linear(32, 1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(input_ids)).square().mean()


model = Model()
engine, *_ = zerowatch.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
    },
    settings={"serve": {"enabled": False}},
)
for number in range(STEPS + 1):
    row = ROWS if number == STEPS else number
    engine.backward(engine(torch.full((4, 16), row, device=engine.device)))
    engine.step()
get_accelerator().synchronize()
