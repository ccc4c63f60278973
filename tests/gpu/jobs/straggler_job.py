"""Trains on two GPUs, of which that of rank 1 is slower in forward: `FOLDER`."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from gpu.jobs import engines
from gpu.jobs.phases_job import cycles_per_ms

import zerowatch
from zerowatch.metrics.catalog import communication

DELAY_MS, SECONDS = 20.0, 20.0
SETTINGS = {**engines.QUIET, "cross_rank": {"interval_seconds": 0.5}}


class Slow(torch.nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.cycles = int(DELAY_MS * rate) if dist.get_rank() == 1 else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cycles:
            torch.cuda._sleep(self.cycles)
        return x


def main() -> None:
    engines.meet()
    model = torch.nn.Sequential(Slow(cycles_per_ms()), engines.layers(1024, 6))
    engine = engines.make_engine(model, engines.ds_config(2))
    watch = zerowatch.watch(engine, SETTINGS)
    records: list[Any] = []
    watch.subscribe(records.append)
    batch = torch.randn(4, 1024, device=engine.device)
    going, ends = torch.ones(1, device=engine.device), time.monotonic() + SECONDS
    while going.item():
        for _ in range(20):
            engines.step(engine, batch)
        going.fill_(float(time.monotonic() < ends))
        dist.broadcast(going, 0)
    scores = watch.snapshot().values.get(communication.STRAGGLER_SCORE, {})
    watch.close()
    engines.report(
        {
            "scores": {" ".join(labels): value for labels, value in scores.items()},
            "forward": [record.phase_seconds.get("forward", 0.0) for record in records[-20:]],
            "failures": engines.hook_failures(watch),
        }
    )


if __name__ == "__main__":
    main()
