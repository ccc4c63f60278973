"""Trains a tiny model, and calls `deepspeed.initialize` by its full name, as most scripts do."""

import argparse

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
arguments = deepspeed.add_config_arguments(parser).parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}
engine, _, _, _ = deepspeed.initialize(
    args=arguments, model=model, config=None if arguments.deepspeed_config else config
)
for step in range(5):
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    loss = engine(batch).square().mean()
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print(f"out: step {step} loss {loss.item()!r}", flush=True)
