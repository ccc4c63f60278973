"""A training script that is killed and restarted; it resumes from its last checkpoint.

`restart_job.py FOLDER STEPS SAVE_EVERY [OPTIONS]`, on any ranks. Logs in FOLDER, per rank, its
process, the first step of each attempt, and every committed window.
"""

from __future__ import annotations

import json
import os
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import zerowatch

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

SAMPLES, WIDTH = 96, 12
CONFIG = {
    "train_micro_batch_size_per_gpu": 3,
    "gradient_clipping": 0.5,
    "steps_per_print": 10**9,
    # Buckets of one tensor: backward has collectives before its end.
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 10},
    # Weights are compared bitwise. DeepSpeed's Adam on CPU multiplies the powers of beta from step
    # to step, but raises them after a load, which gives another last bit.
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 0.01}},
}


class Samples(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        return {"id": index, "x": torch.randn(WIDTH, generator=generator)}


class Net(torch.nn.Module):
    """With dropout, so that generators that are not restored show in the weights."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.body = torch.nn.Linear(WIDTH, WIDTH + 1)
        self.dropout = torch.nn.Dropout(dropout)
        self.head = torch.nn.Linear(WIDTH + 1, WIDTH)
        self.is_memory_full = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        if self.is_memory_full:
            hidden.register_hook(wait)
        return self.head(self.dropout(hidden))


def wait(gradient: torch.Tensor) -> None:
    """Run out of memory as in the wait for a collective, after which no window is run again."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return ((model(batch["x"]) - batch["x"].flip(1)) ** 2).mean()


class FullMemory:
    """Loss whose backward runs out of memory on one rank with more than one sample, from a step on.

    Backward has reduced the head's gradients by then.
    """

    def __init__(self, rank: int, after: int) -> None:
        self.steps = 0
        self._rank, self._after = rank, after

    def __call__(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        is_full = self._rank == 1 and self.steps >= self._after and len(batch["x"]) > 1
        model.module.is_memory_full = is_full
        return loss(model, batch)


class EventLog:
    """Log file of this rank; each line is one write, so that a kill leaves complete lines."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"events-{rank}.jsonl").open("a", buffering=1)
        self._attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))

    def log(self, what: str, **facts: Any) -> None:
        line = json.dumps({"what": what, "attempt": self._attempt, "at": time.time(), **facts})
        self._file.write(f"{line}\n")


def options() -> Namespace:
    parser = ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("save_every", type=int)
    parser.add_argument(
        "--full-after", type=int, help="windows after which rank 1's memory holds one sample"
    )
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each window")
    return parser.parse_args()


def main(chosen: Namespace) -> None:
    rank = int(os.environ["RANK"])
    saves, steps = chosen.folder / "saves", chosen.steps
    events = EventLog(chosen.folder, rank)
    # Each attempt has a port of its own.
    place = {"ranks": int(os.environ["WORLD_SIZE"]), "port": os.environ.get("MASTER_PORT")}
    events.log("started", pid=os.getpid(), **place)
    torch.manual_seed(0)
    memory = FullMemory(rank, steps if chosen.full_after is None else chosen.full_after)
    run = zerowatch.TrainingRun(Net(chosen.dropout), config=CONFIG, loss=memory)
    run.load(saves)
    batches = run.loader(Samples(), batch_samples=8, seed=1).forever()
    events.log("resumed", step=run.steps, address=run.watch.address, run_id=run.watch.run_id)
    while run.steps < steps:
        time.sleep(chosen.pause)
        batch = next(batches)
        memory.steps = run.steps
        done = run.train_batch(batch)
        events.log(
            "committed",
            step=done.step,
            ids=batch["id"].tolist(),
            loss=done.loss,
            micro_batches=done.micro_batches,
            replays=done.replays,
        )
        if done.step % chosen.save_every == 0:
            run.save(saves)
    weights = torch.cat([each.detach().flatten() for each in run.module.parameters()])
    events.log("ended", weights=weights.tolist(), samples=run.samples)
    run.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(options())
