"""Runs out of memory on rank 1 in a pass that issues other collectives than before.

`varying_passes.py FOLDER CASE`, on any ranks. Rank r writes FOLDER/began-r before that window, and
FOLDER/rank-r.json after it: the error that its script got, and the seconds that the window took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import zerowatch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

WINDOWS = 6
FAILING_RANK = 1
STORE_SECONDS = 20.0  # ranks that gloo aborts write no file
SLEEP_SECONDS = 5.0  # several times the interval at which the ranks look for notices
WIDTH = 4
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 10**9,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 10},
    # The optimizer does not matter here, and torch's needs no compiled op.
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 0.01}},
}
USUAL = ("sum", "sum", "sum")
PASSES = {
    "longer": (*USUAL, "sum", "sum"),
    "shorter": USUAL[:2],
    "another group": ("sum", "group", "sum"),
    "another size": ("sum", "large", "sum"),
    "not recorded": ("sum", "torch", "sum"),
    "as before, slow": ("sum", "sleep", *USUAL[1:]),
}


class Net(torch.nn.Module):
    """A model whose forward issues collectives of its own, as a loss in chunks does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(WIDTH, WIDTH)
        self.calls: tuple[str, ...] = USUAL
        self.runs_out = False
        self.group: Any = None  # a second group of all ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, kind in enumerate(self.calls):
            if self.runs_out and number == 1:
                self.runs_out = False
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
            if kind == "sleep":
                time.sleep(SLEEP_SECONDS)
            elif kind == "torch":
                dist.all_reduce(torch.ones(3))
            elif kind == "group":
                deepspeed.comm.all_reduce(torch.ones(5), group=self.group)
            else:
                deepspeed.comm.all_reduce(torch.ones(5 if kind == "sum" else 50_000))
        return self.body(x)


def keep_store(folder: Path) -> None:
    """Wait for the other healthy ranks: they read the failure from the store in this process."""
    others = set(range(int(os.environ["WORLD_SIZE"]))) - {0, FAILING_RANK}
    deadline = time.monotonic() + STORE_SECONDS
    while not all((folder / f"rank-{rank}.json").exists() for rank in others):
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) ** 2).mean()


def main(folder: Path, case: str) -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    run = zerowatch.TrainingRun(Net(), config=CONFIG, loss=loss)
    batch = {"x": torch.ones(2, WIDTH)}
    for _ in range(WINDOWS):
        run.train_batch(batch)
    run.module.group = dist.new_group()
    run.module.calls = PASSES[case]
    run.module.runs_out = rank == FAILING_RANK
    (folder / f"began-{rank}").touch()
    began, error = time.monotonic(), None
    try:
        run.train_batch(batch)
    except Exception as raised:
        error = raised
        raise
    finally:
        found = {
            "error": type(error).__name__,
            "text": str(error),
            "seconds": time.monotonic() - began,
        }
        (folder / f"rank-{rank}.json").write_text(json.dumps(found))
        print(f"rank {rank}: {found}", file=sys.stderr, flush=True)
        if rank == 0:
            keep_store(folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
