"""Trains until it is killed or interrupted."""

import signal

import deepspeed
import torch

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
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
while True:
    engine.backward(engine(torch.ones(4, 8)).square().mean())
    engine.step()
