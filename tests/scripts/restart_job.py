"""A training script that is killed and started again: goes on from its last save, data and all.

`restart_job.py FOLDER STEPS SAVE_EVERY`, on any ranks. Notes in FOLDER, per rank: its process once
it has started, its first window of each attempt, and the samples of every window once committed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import resume_run
import torch
import torch.distributed as dist

import zerowatch
from zerowatch.runtime.loader import resumable_loader

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

SAMPLES, WIDTH = 96, 12
CONFIG = {
    "train_micro_batch_size_per_gpu": 3,
    "gradient_clipping": 0.5,
    "steps_per_print": 10**9,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 0.01}},
}


class Samples(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        return {"id": index, "x": torch.randn(WIDTH, generator=generator)}


class Net(torch.nn.Module):
    """With dropout: a generator that went on elsewhere would be seen in the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(WIDTH, WIDTH + 1)
        self.dropout = torch.nn.Dropout(0.2)
        self.head = torch.nn.Linear(WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(torch.tanh(self.body(x))))


def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return ((model(batch["x"]) - batch["x"].flip(1)) ** 2).mean()


class Notes:
    """Lines in a file of this rank; each is one write, so that a kill leaves whole ones."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"notes-{rank}.jsonl").open("a", buffering=1)
        self._attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))

    def note(self, what: str, **facts: Any) -> None:
        line = json.dumps({"what": what, "attempt": self._attempt, "at": time.time(), **facts})
        self._file.write(f"{line}\n")


def main(folder: Path, steps: int, save_every: int) -> None:
    rank = int(os.environ["RANK"])
    notes = Notes(folder, rank)
    notes.note("started", pid=os.getpid())
    torch.manual_seed(0)
    run = zerowatch.TrainingRun(Net(), config=CONFIG, loss=loss)
    data = resumable_loader(
        Samples(), batch_samples=8, rank=rank, world_size=dist.get_world_size(), seed=1
    )
    state = resume_run.load(run, folder / "saves", data)
    where = {"address": run.watch.address, "run_id": run.watch.run_id}
    notes.note("resumed", step=run.steps, found=state is not None, **where)
    batches = data.forever()
    while run.steps < steps:
        batch = next(batches)
        done = run.train_batch(batch)
        notes.note("committed", step=done.step, ids=batch["id"].tolist(), loss=done.loss)
        if done.step % save_every == 0:
            resume_run.save(run, folder / "saves", data)
    weights = torch.cat([each.detach().flatten() for each in run.module.parameters()])
    notes.note("ended", weights=weights.tolist(), samples=run.samples)
    run.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
