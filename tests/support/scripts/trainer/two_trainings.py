"""Trains twice, one training after the other; a third run is made while the first is open."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch

import zerowatch

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    mean: torch.Tensor = model(batch).square().mean()
    return mean


def new_run() -> zerowatch.TrainingRun:
    return zerowatch.TrainingRun(
        torch.nn.Linear(4, 1),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "Adam"},
            "steps_per_print": 10**9,
        },
        loss=loss,
        settings={"serve": {"enabled": False}, "console": "off"},
    )


def train(steps: int, *, beside: bool = False) -> None:
    run = new_run()
    if beside:
        new_run().close()
    for _ in range(steps):
        run.train_batch(torch.ones(2, 4))
    run.close()


train(3, beside=True)
train(5)
