"""Trains one rank with the tuner, then compares the tuned configuration with others.

It is asked for {"tuner": keywords of TrainingRun, "settings": the tuner's, "seconds": how long to
train, "rivals": {name: configuration}, "rounds", "settle_steps", "steps": of the comparison,
"micro_batch_samples" and "stage" to begin with, "length" of a sample}. A file "stop" in its folder
ends the training early.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from bench.tuner_link.linked_model import (
    asked,
    batch,
    configuration_of,
    leave,
    new_run,
    report,
    visit,
)

from zerowatch.metrics.catalog.tuner import TUNER_EXPLORATION_SECONDS


def main(asked: dict[str, Any]) -> None:
    folder = Path(asked["folder"])
    stop_file = folder / "tuner.stop"
    settings = {"tuner": asked["settings"] | {"stop_file": str(stop_file)}}
    run = new_run(
        asked["micro_batch_samples"], asked.get("stage", 2), settings=settings, **asked["tuner"]
    )
    train(run, asked["length"], asked["seconds"], folder / "stop")
    explored = run.watch.snapshot().total(TUNER_EXPLORATION_SECONDS)
    stop_file.touch()
    for _ in range(4):  # in which the trial is rolled back
        run.train_batch(batch(length=asked["length"]))
    report({"found": configuration_of(run), "exploration_seconds": explored})
    compare(run, asked)
    leave(run)


def train(run: Any, length: int, seconds: float, stop: Path) -> None:
    """Train until the time is over; report each step."""
    began = before = time.perf_counter()
    while True:
        result = run.train_batch(batch(length=length))
        now = time.perf_counter()
        report(
            {
                "step": run.steps,
                "unix_seconds": time.time(),
                "seconds": now - before,
                "micro_batches": len(result.micro_batches),
                "configuration": configuration_of(run),
            }
        )
        before = now
        over = now - began > seconds or stop.exists()
        if run._host_group.all_max(int(over and dist.get_rank() == 0)):
            return


def compare(run: Any, asked: dict[str, Any]) -> None:
    """Measure the configuration found and its rivals alternately, there and back."""
    compared = {"found": configuration_of(run)} | asked["rivals"]
    names = [*compared]
    for number in range(asked["rounds"]):
        for name in names if number % 2 == 0 else reversed(names):
            found = visit(run, compared[name], asked["settle_steps"], asked["steps"])
            report({"compared": name, **found})


if __name__ == "__main__":
    main(asked())
