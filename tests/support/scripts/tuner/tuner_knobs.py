"""A small TrainingRun with its knobs, for the jobs that set them."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import zerowatch
from zerowatch.runtime.tuner.knobs.run_knobs import RunKnobs

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

WIDTH, SHARE, MICRO_BATCH = 32, 4, 2
QUIET = {
    **{part: {"enabled": False} for part in ("serve", "run_log", "cross_rank")},
    "tuner": {"mode": "off"},
}


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(WIDTH, 3 * WIDTH + 1)  # no multiple of the ranks
        self.drop = torch.nn.Dropout(0.1)
        self.back = torch.nn.Linear(3 * WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(self.drop(torch.nn.functional.gelu(self.wide(x))))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)


def mean_square(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def make_run(stage: int, **zero: Any) -> zerowatch.TrainingRun:
    torch.manual_seed(0)
    model = Net()
    sizes = {"reduce_bucket_size": 4096, "stage3_param_persistence_threshold": 100}
    run = zerowatch.TrainingRun(
        model,
        config={
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage, **sizes, **zero},
        },
        # DeepSpeed's own is not bitwise equal after a rebuild: see tuned_training.py.
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=mean_square,
        settings=QUIET,
    )
    torch.manual_seed(7 + dist.get_rank())  # for dropout
    return run


def knobs_of(run: zerowatch.TrainingRun) -> RunKnobs:
    return RunKnobs(run._engine_holder, run._window_runner, run._host_group)


def train(run: zerowatch.TrainingRun, windows: int = 1) -> None:
    """Train some windows; each window's batch depends on its number."""
    for _ in range(windows):
        data = torch.Generator().manual_seed(1000 * run.steps + dist.get_rank())
        x = torch.randn(SHARE, WIDTH, generator=data)
        run.train_batch({"x": x, "y": torch.randn(SHARE, generator=data)})


def weights(run: zerowatch.TrainingRun) -> torch.Tensor:
    parts = []
    for parameter in run.module.parameters():
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                parts.append(parameter.detach().clone().flatten())
        else:
            parts.append(parameter.detach().clone().flatten())
    return torch.cat(parts)


def end(run: zerowatch.TrainingRun) -> None:
    run.close()
    run.engine.destroy()


def untouched(stage: int, windows: int, **zero: Any) -> torch.Tensor:
    """Return the weights of a run whose knobs were never set."""
    run = make_run(stage, **zero)
    train(run, windows)
    final = weights(run)
    end(run)
    return final
