"""Trains until one rank skips one collective; then hangs until it is ended, or dies.

Usage: skip_job.py RANK CALL STEP. The script issues four collectives of its own in each step, of
which RANK skips number CALL (from 0 on) in step STEP. The effect in gloo differs: two
all_reduces of different sizes kill a process, different operations or groups hang.
"""

from __future__ import annotations

import sys
import time

import deepspeed
import torch
import torch.distributed as dist

import zerowatch

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def collectives(skipped: int | None) -> None:
    """Issue the collectives, except for one."""
    ones = torch.ones
    calls = (
        lambda: dist.all_reduce(ones(1)),
        lambda: dist.all_reduce(ones(50_000)),
        lambda: dist.all_gather([ones(3) for _ in range(dist.get_world_size())], ones(3)),
        lambda: dist.all_reduce(ones(7)),
    )
    for number, call in enumerate(calls):
        if number != skipped:
            call()


def main(rank: int, call: int, step: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    engine = zerowatch.initialize(
        settings={"serve": {"enabled": False}},
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1},
        },
    )[0]
    for number in range(step + 3):
        engine.backward(engine(torch.ones(4, 16)).square().mean())
        engine.step()
        if number == step:
            sys.stderr.write(f"\nskipping at {time.time():.3f}\n")  # at once: ranks share it
        collectives(call if number == step and dist.get_rank() == rank else None)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
