"""Trains a tiny model with Hugging Face Accelerate and gradient accumulation."""

import os

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
plugin = DeepSpeedPlugin(
    # Without train_batch_size: on CPU, Accelerate takes each process for the only one.
    hf_ds_config={
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2},
        "zero_force_ds_cpu_optimizer": False,
    }
)
accelerator = Accelerator(deepspeed_plugin=plugin)
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
loader = torch.utils.data.DataLoader(data, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if os.environ["RANK"] == "0":
        print(f"out: loss {loss.item()!r}", flush=True)
torch.distributed.destroy_process_group()
