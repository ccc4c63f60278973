"""Trains on two GPUs; rank 1 sleeps for longer than the timeout of hangs, and resumes: `FOLDER`."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from gpu.jobs import engines

import zerowatch

STEPS, STUCK_AT, TIMEOUT_SECONDS, STUCK_SECONDS = 40, 20, 4.0, 20.0
SETTINGS = {
    "serve": {"enabled": False},
    "hang": {"timeout_seconds": TIMEOUT_SECONDS},
    "cross_rank": {"interval_seconds": 1.0},
}


def main() -> None:
    engines.meet()
    engine = engines.make_engine(engines.layers(256, 3), engines.ds_config(2))
    batch = torch.randn(4, 256, device=engine.device)
    engines.step(engine, batch).item()
    contexts = [engines.contexts()]
    watch = zerowatch.watch(engine, SETTINGS)
    for number in range(STEPS):
        if number == STUCK_AT and dist.get_rank() == 1:
            time.sleep(STUCK_SECONDS)
        engines.step(engine, batch).item()
    contexts.append(engines.contexts())
    watch.close()
    folder = watch.run_folder
    assert folder is not None
    reports = {file.name: file.read_text() for file in folder.glob("hang-*.txt")}
    recorded = [file.name for file in folder.glob("hang-*.flight.json")]
    dist.barrier()
    failures = engines.hook_failures(watch)
    engines.report(
        {"reports": reports, "recorded": recorded, "failures": failures, "contexts": contexts}
    )


if __name__ == "__main__":
    main()
