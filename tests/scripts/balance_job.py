"""Two ranks, the second one slow: trains with shares by speed and with even ones; JSON per rank.

`balance_job.py FOLDER STAGE...`
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import zerowatch

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

BATCH, WIDTH, DATA_SAMPLES = 12, 8, 100
SAMPLE_SECONDS = (0.002, 0.004)  # by rank
# What collectives blocked, from stage 2 on, the watch tells once a second.
WINDOWS = {1: 24, 2: 70, 3: 70}
QUIET = {"serve": {"enabled": False}, "run_log": {"enabled": False}, "exchange": {"enabled": False}}


class Slow(torch.nn.Module):
    """Takes its time over each sample."""

    def __init__(self, sample_seconds: float) -> None:
        super().__init__()
        self.body = torch.nn.Linear(WIDTH, WIDTH + 1)
        self.head = torch.nn.Linear(WIDTH + 1, 1)
        self.sample_seconds = sample_seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(len(x) * self.sample_seconds)
        return self.head(torch.tanh(self.body(x))).squeeze(1)


def mean_square(model: Any, batch: Any) -> torch.Tensor:
    x, y, _ = batch
    return torch.nn.functional.mse_loss(model(x), y)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(DATA_SAMPLES, WIDTH, generator=generator)
    return TensorDataset(x, x.sum(dim=1), torch.arange(DATA_SAMPLES))


def train(stage: int, *, balance: bool, num_workers: int) -> dict[str, Any]:
    """Train; return the samples that this rank saw by window, the last loss and the weights."""
    torch.manual_seed(0)
    model = Slow(SAMPLE_SECONDS[dist.get_rank()] if balance else 0.0)
    run = zerowatch.TrainingRun(
        model,
        config={
            "train_micro_batch_size_per_gpu": 3,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=mean_square,
        settings=QUIET,
        balance=balance,
    )
    seen, loss = [], 0.0
    for _, batch in zip(
        range(WINDOWS[stage]),
        run.loader(data(), batch_samples=BATCH, num_workers=num_workers).forever(),
        strict=False,
    ):
        loss = run.train_batch(batch).loss
        seen.append(batch[2].tolist())
    weights = gathered(model)
    run.close()
    return {"seen": seen, "loss": loss, "weights": weights, "samples": run.samples}


def gathered(model: torch.nn.Module) -> list[float]:
    """Return all weights, whole under every stage."""
    parameters = list(model.parameters())
    if not hasattr(parameters[0], "ds_id"):
        return torch.cat([one.detach().flatten() for one in parameters]).tolist()
    with deepspeed.zero.GatheredParameters(parameters):
        return torch.cat([one.detach().flatten() for one in parameters]).tolist()


def main(folder: Path, stages: list[int]) -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    told = {}
    for stage in stages:
        told[stage] = {
            "balanced": train(stage, balance=True, num_workers=1),
            "even": train(stage, balance=False, num_workers=0),
        }
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), list(map(int, sys.argv[2:])))
    dist.destroy_process_group()
