"""Delays one rank in one phase after the other, and writes the metrics, as JSON per rank.

Usage: straggler_job.py FOLDER CASE...; a CASE is a phase, or a control without a delay. Each case
trains a fresh engine until rank 0 has compared the ranks' step times some times, however long that
takes. With a delay only the comparisons count in which most of the slow rank's steps have it: those
of the first second or two began before it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import zerowatch
from zerowatch.metrics.catalog import communication, training
from zerowatch.metrics.catalog.labels import COMPARED_PHASES
from zerowatch.runtime.cross_rank.stragglers import StragglerDetector

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

DELAY_SECONDS = 0.07  # far more than a rank waits for a core of a busy machine
EXCHANGE_SECONDS = 0.3
COMPARISONS = 3  # of a case
SLOW_RANK = 1
PHASES = COMPARED_PHASES
WIDTH, BATCH = 256, 64


class Comparisons:
    """Counts how often rank 0 has compared step times: without a delay, or with it."""

    count = 0

    def install(self) -> None:
        compare = StragglerDetector.update

        def counted(detector, step_times, reference):
            self.count += not delay.phase or delay.shows_in(step_times)
            return compare(detector, step_times, reference)

        StragglerDetector.update = counted


comparisons = Comparisons()


class Delay:
    """Sleeps in one phase of one rank."""

    phase = ""
    slept = 0.0

    def shows_in(self, step_times) -> bool:
        """Whether the median of the slow rank's steps has the delay."""
        busy_seconds = step_times[SLOW_RANK].busy_seconds[COMPARED_PHASES.index(self.phase)]
        return busy_seconds > DELAY_SECONDS / 2

    def at(self, phase: str) -> None:
        if phase == self.phase and dist.get_rank() == SLOW_RANK:
            began = time.perf_counter()
            time.sleep(DELAY_SECONDS)
            self.slept += time.perf_counter() - began


delay = Delay()


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        delay.at("backward")
        return gradient


class SlowData(TensorDataset):
    def __getitems__(self, indices):
        delay.at("data")
        return [super(SlowData, self).__getitem__(i) for i in indices]


class SlowOptimizer(torch.optim.SGD):
    def step(self, closure=None):
        delay.at("optimizer")
        return super().step(closure)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.rest = torch.nn.Sequential(
            *(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)), torch.nn.Linear(WIDTH, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        delay.at("forward")
        return self.rest(SlowBackward.apply(self.first(x))).square().mean()


def make_engine():
    torch.manual_seed(0)
    model = Net()
    return zerowatch.initialize(
        settings={
            "serve": {"enabled": False},
            "run_log": {"enabled": False},
            "cross_rank": {"interval_seconds": EXCHANGE_SECONDS},
        },
        model=model,
        optimizer=SlowOptimizer(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 2},
        },
    )[0]


def batches():
    return iter(
        DataLoader(SlowData(torch.ones(1, WIDTH).expand(BATCH * 10_000, -1)), batch_size=BATCH)
    )


def train(engine, num_comparisons: int) -> int:
    """Train until rank 0 has compared so often, all ranks for as many steps; return how many."""
    loader = batches()
    enough, steps = comparisons.count + num_comparisons, 0
    going = torch.ones(1)
    while going:
        (batch,) = next(loader)
        engine.backward(engine(batch))
        engine.step()
        delay.at("other")
        steps += 1
        if steps % 10 == 0:
            going.fill_(float(comparisons.count < enough))
            dist.broadcast(going, 0)
    return steps


def starved_seconds() -> float:
    """Return how long the threads of this process were ready to run, but had no core."""
    delays = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            delays += int((task / "schedstat").read_text().split()[1])
    return delays / 1e9


def run(phase: str, lines: list[tuple[int, str]]) -> dict:
    delay.phase, delay.slept = "", 0.0
    engine = make_engine()
    if phase:  # without a delay at first, as the ranks start apart
        train(engine, 2)
    before = engine.watch.snapshot().total(communication.COMM_WAIT_SECONDS)
    lines.clear()
    delay.phase, began = phase, time.monotonic()
    compared, starved = comparisons.count, starved_seconds()
    steps = train(engine, COMPARISONS)
    seconds, starved = time.monotonic() - began, starved_seconds() - starved
    engine.watch.close()
    seen = engine.watch.snapshot()
    engine.destroy()
    by_label = {
        name: {labels[0]: value for labels, value in seen.values.get(spec, {}).items()}
        for name, spec in (
            ("score", communication.STRAGGLER_SCORE),
            ("wait", communication.COMM_WAIT_SECONDS),
            ("transfer", communication.COMM_TRANSFER_SECONDS),
            ("exposed", communication.COMM_EXPOSED_SECONDS),
            ("comm", communication.COMM_SECONDS),
            ("cause", communication.COMM_CAUSE_SECONDS),
            ("failures", communication.EXCHANGE_FAILURES),
            ("phase", training.PHASE_SECONDS),
            ("latency", communication.COMM_LINK_LATENCY),
            ("bandwidth", communication.COMM_LINK_BANDWIDTH),
        )
    }
    result = {
        "steps": steps,
        "slept": delay.slept,
        "waited": seen.total(communication.COMM_WAIT_SECONDS) - before,
        "lines": [line for _, line in lines],
        "comparisons": [count - compared for count, _ in lines],
        "starved": starved,
        "starved_ratio": starved / seconds,
    }
    return result | by_label


def listen() -> list[tuple[int, str]]:
    lines: list[tuple[int, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((comparisons.count, record.getMessage()))
    logging.getLogger("zerowatch").addHandler(handler)
    return lines


if __name__ == "__main__":
    with suppress(PermissionError):  # as root, so that no other process takes the cores
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    deepspeed.init_distributed("gloo", verbose=False)
    comparisons.install()
    lines = listen()
    results = {case: run(case if case in PHASES else "", lines) for case in sys.argv[2:]}
    Path(sys.argv[1], f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()  # rank 0 hosts the store, through which the last calls are compared
