"""Takes a step on one rank with DeepSpeed's defaults, and ends as the argument says.

Usage: end_or_fail.py [raise|exit].
"""

import sys
import time
from pathlib import Path

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}
model = torch.nn.Linear(8, 1)
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=list(model.parameters()), config=config
)
engine.backward(engine(torch.ones(4, 8)).square().mean())
engine.step()
while not list(Path("runs").glob("*/targets.json")):  # written within a second
    time.sleep(0.05)
if sys.argv[1:] == ["raise"]:
    raise RuntimeError("no more data")
if sys.argv[1:] == ["exit"]:
    sys.exit(1)
