"""Trains until a file asks it to end; other files switch faults on and off.

Usage: faults_job.py FOLDER. The ranks do what files in FOLDER say for as long as those are there:
`end`, after which every rank ends well, and for rank 1 `slow`, `grow` and `nan`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import deepspeed
import psutil
import torch
import torch.distributed as dist

import zerowatch

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

FAULTY_RANK = 1
MIB = 2**20
# 1.6 MB of gradients in four buckets: 2.4 MB on the wire a step, which 200 Mbit/s carry in 0.1 s.
LAYERS, WIDTH, BATCH, BUCKET = 4, 316, 8, 100_000
# A sleep replaces computing, so that the machine's two cores are free for the servers.
COMPUTE_SECONDS, SLOWNESS_SECONDS = 0.13, 0.03
BUDGET_BYTES, GROWTH_BYTES = 300 * MIB, MIB


class Faults:
    """Faults of this rank, switched on by files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_faulty = dist.get_rank() == FAULTY_RANK
        self._kept: list[torch.Tensor] = []

    def is_requested(self, name: str) -> bool:
        return (self._folder / name).exists()

    def compute(self, *_: object) -> None:
        """Sleep as long as a forward pass takes; a hook on the model."""
        slow = self._is_faulty and self.is_requested("slow")
        time.sleep(COMPUTE_SECONDS + (SLOWNESS_SECONDS if slow else 0.0))

    def keep_something(self) -> None:
        """Allocate memory in each step, or free all of it."""
        if self._is_faulty and self.is_requested("grow"):
            self._kept.append(torch.ones(GROWTH_BYTES, dtype=torch.uint8))
        else:
            self._kept.clear()

    def spoil(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, or NaN with unchanged gradients."""
        return loss + float("nan") if self._is_faulty and self.is_requested("nan") else loss


def make_engine(faults: Faults):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model.register_forward_pre_hook(faults.compute)
    budget = psutil.Process().memory_info().rss + BUDGET_BYTES
    return zerowatch.initialize(
        settings={"memory": {"host_limit_bytes": budget}},
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": BUCKET},
        },
    )[0]


def train(engine, faults: Faults) -> None:
    """Train until any rank finds the request to end; all ranks end at the same step."""
    batch, ending = torch.ones(BATCH, WIDTH), torch.zeros(1)
    while not ending:
        engine.backward(faults.spoil(engine(batch).square().mean()))
        engine.step()
        faults.keep_something()
        ending.fill_(faults.is_requested("end"))
        dist.all_reduce(ending, op=dist.ReduceOp.MAX)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    deepspeed.init_distributed("gloo", verbose=False)
    faults = Faults(folder)
    engine = make_engine(faults)
    (folder / f"rank-{dist.get_rank()}.pid").write_text(str(os.getpid()))
    train(engine, faults)
    engine.watch.close()
