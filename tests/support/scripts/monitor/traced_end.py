"""Trains a tiny monitored model, and reports when it was done, to measure the cost of the exit.

The last line says whether OpenTelemetry's SDK was loaded; WITHOUT_OTEL hides it.
"""

import atexit
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
atexit.register(lambda: print("out:", "opentelemetry.sdk.trace" in sys.modules))
if "WITHOUT_OTEL" in os.environ:
    sys.modules["opentelemetry.sdk"] = None
torch.manual_seed(0)
os.environ["LOCAL_RANK"] = "0"
store = Path("store").absolute()
deepspeed.init_distributed(
    "gloo", init_method=f"file://{store}", rank=0, world_size=1, auto_mpi_discovery=False
)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}
model = torch.nn.Linear(8, 1)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(5):
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    engine.backward(engine(batch).square().mean())
    engine.step()
print(f"out: {time.time()!r}", flush=True)
