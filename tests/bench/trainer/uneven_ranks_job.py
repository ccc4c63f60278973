"""Runs one of two unequal ranks: windows with even shares, and with shares by speed."""

from __future__ import annotations

import os
import time
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from bench import gpt_training
from torch.utils.data import TensorDataset

import zerowatch

WIDTH, DATA_SAMPLES = 64, 4096
QUIET = {
    "serve": {"enabled": False},
    "run_log": {"enabled": False},
    "cross_rank": {"enabled": False},
}


class Slow(torch.nn.Module):
    """Module that delays each sample, by sleeping or by computing."""

    def __init__(self, sample_seconds: float, slowness: int, *, asleep: bool) -> None:
        super().__init__()
        self.body = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.head = torch.nn.Linear(4 * WIDTH, 1)
        self.sample_seconds, self.slowness, self.asleep = sample_seconds, slowness, asleep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seconds = len(x) * self.sample_seconds * self.slowness
        if self.asleep:
            time.sleep(seconds)
        else:
            work(seconds)
        return self.head(torch.tanh(self.body(x))).squeeze(1)


def work(cpu_seconds: float) -> None:
    """Compute until this thread has used `seconds` of CPU time."""
    until = time.thread_time() + cpu_seconds
    numbers = torch.ones(64, 64)
    while time.thread_time() < until:
        numbers = torch.tanh(numbers @ numbers)


def mean_square(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def main() -> None:
    asked = gpt_training.arguments()
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gpt_training.meet()
    slowness = asked["slowness"] if rank == 1 else 1
    model = Slow(asked["sample_seconds"], slowness, asleep=asked["asleep"])
    run = zerowatch.TrainingRun(
        model,
        config={
            "train_micro_batch_size_per_gpu": asked["micro_batch"],
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": asked["stage"], "stage3_param_persistence_threshold": 0},
        },
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=mean_square,
        settings=QUIET,
        balance=True,
    )
    gpt_training.report(measure(run, asked))


def measure(run: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Wait until the run has balanced its ranks, then time blocks of both kinds in turn."""
    data = TensorDataset(torch.randn(DATA_SAMPLES, WIDTH), torch.randn(DATA_SAMPLES))
    loader = run.loader(data, batch_samples=asked["batch"]).forever()
    found = []
    for batch in islice(loader, asked["settling_windows"]):
        run.train_batch(batch)
        found.append(len(batch[1]))
    even, own = asked["batch"] // dist.get_world_size(), found[-1]
    blocks = [
        {
            name: time_block(run, data[:size], asked["block_windows"])
            for name, size in in_turn([("even", even), ("balanced", own)], number)
        }
        for number in range(asked["blocks"])
    ]
    run.close()
    return {"blocks": blocks, "found": own, "settled_after": settled_after(found)}


def in_turn(arms: list[tuple[str, int]], number: int) -> list[tuple[str, int]]:
    return arms if number % 2 else arms[::-1]


def time_block(run: Any, share: Any, num_windows: int) -> float:
    """Return the seconds of a window, over a block that the ranks begin together."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(num_windows):
        run.train_batch(share)
    return (time.perf_counter() - begin) / num_windows


def settled_after(sizes: list[int]) -> int:
    """Return the window from which on the share was the one in the end."""
    return max((index + 1 for index, size in enumerate(sizes) if size != sizes[-1]), default=0)


if __name__ == "__main__":
    main()
