"""Trains a tiny model with gradient accumulation; uses `from deepspeed import initialize`."""

import deepspeed
import torch
from deepspeed import initialize

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.manual_seed(0)
engine, _, _, _ = initialize(
    model=torch.nn.Linear(8, 1),
    config={
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
        # This rank is not forked, and would load DeepSpeed's own, which takes 2 s of CPU.
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    },
)
for micro in range(8):
    batch = torch.randn(2, 8, generator=torch.Generator().manual_seed(micro))
    loss = engine(batch).square().mean()
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print(f"out: micro {micro} loss {loss.item()!r}", flush=True)
torch.distributed.destroy_process_group()
