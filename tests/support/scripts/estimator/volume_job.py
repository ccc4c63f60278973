"""Trains several configurations and writes the measured volume ratios, as JSON per rank.

`volume_job.py FOLDER NAME...`
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

import zerowatch
from zerowatch.metrics.catalog import communication
from zerowatch.metrics.step_record import StepRecord
from zerowatch.runtime.estimator.volume_check import (
    STEPS_AFTER_CHANGE,
    STEPS_TO_REPORT,
    WARM_UP_STEPS,
)
from zerowatch.runtime.monitor import watch_thread

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

watch_thread.TICK_SECONDS = 0.02  # between two publications, by default a second
LIMIT_SECONDS = 300.0

WIDTH, LAYERS, STEPS = 256, 4, 12
CASES = {
    "stage 0": ({"stage": 0}, 1),
    "stage 1": ({"stage": 1}, 1),
    "stage 1, accumulation 4": ({"stage": 1}, 4),
    "stage 2": ({"stage": 2}, 1),
    "stage 2, accumulation 4": ({"stage": 2}, 4),
    "stage 3": ({"stage": 3, "stage3_param_persistence_threshold": 0}, 1),
    "own collectives": ({"stage": 2}, 1),
}


class Estimates:
    """Waits for the estimates of a watch. A watch passes a step to listeners after its check."""

    def __init__(self, watch: zerowatch.Watch) -> None:
        self._records: list[StepRecord] = []
        watch.subscribe(self._records.append)

    def wait(self, steps: int) -> None:
        """Wait until so many steps were checked, and the estimate exists that the last started."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not self._records or self._records[-1].step < steps:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for thread in threading.enumerate():
            if thread.name == "zerowatch-estimate":
                thread.join(LIMIT_SECONDS)


def train(name: str, zero: dict, accumulation: int, lines: list[str]) -> dict:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    engine = zerowatch.initialize(
        settings={"serve": {"enabled": False}, "run_log": {"enabled": False}},
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulation,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
        },
    )[0]
    estimates = Estimates(engine.watch)
    lines.clear()
    for number in range(STEPS):
        for _ in range(accumulation):
            engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
            engine.step()
        if name == "own collectives":
            dist.all_reduce(torch.ones(100_000))
        if number in (5, 6):
            estimates.wait(number + 1)
    engine.watch.close()
    snapshot = engine.watch.snapshot()
    engine.destroy()
    wire = {kind: v for (kind,), v in snapshot.values[communication.COMM_STEP_WIRE_BYTES].items()}
    ratio = snapshot.value(communication.COMM_VOLUME_RATIO)
    return {"ratio": ratio, "wire": wire, "lines": list(lines)}


def change_settings(lines: list[str]) -> dict:
    """Change knobs while training, then compress; return measured and predicted bytes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    run = zerowatch.TrainingRun(
        model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 2},
        },
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        loss=lambda engine, x: engine(x).square().mean(),
        settings={"serve": {"enabled": False}, "run_log": {"enabled": False}},
    )
    estimates = Estimates(run.watch)
    lines.clear()

    def train_more(steps: int) -> None:
        for _ in range(steps):
            run.train_batch(torch.ones(2, WIDTH))

    def wire() -> dict[str, float]:
        values = run.watch.snapshot().values[communication.COMM_STEP_WIRE_BYTES]
        return {kind: value for (kind,), value in values.items()}

    def train_until_estimated() -> None:
        """Train until the change is detected, and then until an estimate for it exists."""
        for steps in (1, STEPS_AFTER_CHANGE + 1):
            train_more(steps)
            estimates.wait(run.steps)

    train_more(WARM_UP_STEPS)
    estimates.wait(run.steps)
    run._tuner._knobs.apply(
        {"reduce_bucket_size": WIDTH * WIDTH, "use_multi_rank_bucket_allreduce": False}
    )
    train_until_estimated()
    train_more(STEPS_TO_REPORT + 1)
    estimates.wait(run.steps)
    volumes = {"turned": wire()}
    run.compress("int8")
    train_until_estimated()
    train_more(STEPS_TO_REPORT + 1)
    run.close()
    volumes["compressed"] = wire()
    return {**volumes, "lines": [line for line in lines if "collectives" in line]}


def listen() -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("zerowatch").addHandler(handler)
    return lines


if __name__ == "__main__":
    deepspeed.init_distributed("gloo", verbose=False)
    lines = listen()
    results = {name: train(name, *CASES[name], lines) for name in sys.argv[2:]}
    results["turned"] = change_settings(lines)
    Path(sys.argv[1], f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))
