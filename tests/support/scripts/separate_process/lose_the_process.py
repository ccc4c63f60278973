"""Trains, kills its own monitoring process after five steps, and trains on: `FOLDER`.

Writes the final weights as JSON. If NO_PROCESS is set, no monitoring process can be started.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import deepspeed
import torch

import zerowatch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.manual_seed(0)
if os.environ.get("NO_PROCESS"):
    sys.executable = "/nonexistent"
model = torch.nn.Linear(8, 1)
engine, *_ = zerowatch.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    },
)
is_separate = type(engine.watch.recorder).__name__ == "ForwardedRecorder"
for step in range(20):
    if step == 5 and is_separate:
        process = engine.watch._server._process
        process.wait_until_started()
        os.kill(process.pid, signal.SIGKILL)
        while process.is_alive:
            time.sleep(0.01)
    engine.backward(engine(torch.ones(4, 8)).square().mean())
    engine.step()
engine.watch.close()
Path(sys.argv[1], "result.json").write_text(
    json.dumps({"weights": [p.tolist() for p in model.parameters()], "steps": engine.global_steps})
)
