"""Trains; rank 1 is killed after 20 steps, and the restarted ranks train until that is reported."""

import os
import signal
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
model = torch.nn.Linear(8, 1)
engine, _, _, _ = deepspeed.initialize(
    model=model,
    model_parameters=list(model.parameters()),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
    },
)
is_restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
run = Path("runs", os.environ["ZEROWATCH_RUN_ID"])


def is_done() -> bool:
    """Agree whether the report is there, of which rank 0 decides."""
    done = torch.tensor([float(bool(list(run.glob("*/rank-1-killed.txt"))))])
    dist.broadcast(done, 0)
    return bool(done)


while not (is_restarted and is_done()):
    engine.backward(engine(torch.ones(4, 8)).square().mean())
    engine.step()
    marker = run / f"rank-{engine.global_rank}.alive.json"
    has_marker = torch.tensor([float(marker.exists())])
    dist.all_reduce(has_marker, dist.ReduceOp.MIN)
    if not is_restarted and engine.global_steps >= 20 and has_marker and engine.global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
