"""Trains with one rank late at each step, under a plain watch and under a TrainingRun.

Usage: late_rank_job.py FOLDER RANK:PLACE... Each case is the rank that is late, and where: in its
data or in the script. What each watch measured is written as JSON per rank.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import zerowatch
from zerowatch.metrics.catalog import communication
from zerowatch.metrics.catalog.labels import PHASES
from zerowatch.metrics.catalog.spec import MetricSpec
from zerowatch.metrics.recorder import Snapshot
from zerowatch.metrics.step_record import StepRecord

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

DELAY_SECONDS = 0.2
BATCH, WIDTH = 4, 16
WARM_UP_STEPS = 4  # in them no rank is late; the first three are not compared
STEPS = 10  # the ranks compare eight or more
EXCHANGE_SECONDS = 0.25
LIMIT_SECONDS = 120.0  # of a wait for comparisons
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "steps_per_print": 10**9,
    "zero_optimization": {"stage": 1},
}
SETTINGS = {
    "serve": {"enabled": False},
    "run_log": {"enabled": False},
    "cross_rank": {"interval_seconds": EXCHANGE_SECONDS},
}
Step = Callable[[], None]


class Delay:
    """Sleeps on one rank in one place, and measures how long: a busy machine wakes it later."""

    place = ""
    rank = 0

    def __init__(self) -> None:
        self.slept: list[float] = []

    def at(self, place: str) -> None:
        if place == self.place and dist.get_rank() == self.rank:
            began = time.perf_counter()
            time.sleep(DELAY_SECONDS)
            self.slept.append(time.perf_counter() - began)


delay = Delay()


class Data(TensorDataset):
    def __getitem__(self, index):
        if index % BATCH == 0:
            delay.at("data")
        return super().__getitem__(index)


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1))


def watched_only(undo: ExitStack) -> tuple[Any, Step]:
    model = make_model()
    engine = zerowatch.initialize(
        settings=SETTINGS,
        model=model,
        model_parameters=list(model.parameters()),
        config=CONFIG,
    )[0]
    undo.callback(engine.destroy)
    loader = iter(DataLoader(Data(torch.ones(BATCH * 1000, WIDTH)), batch_size=BATCH))

    def step() -> None:
        (batch,) = next(loader)
        delay.at("script")
        engine.backward(engine(batch).square().mean())
        engine.step()

    return engine.watch, step


def in_a_training_run(undo: ExitStack) -> tuple[Any, Step]:
    run = zerowatch.TrainingRun(
        make_model(),
        config=CONFIG,
        loss=lambda engine, batch: engine(batch[0]).square().mean(),
        settings=SETTINGS,
    )
    undo.callback(lambda: run.engine.destroy())
    undo.enter_context(closing(run))
    samples = Data(torch.ones(2 * BATCH * 1000, WIDTH))
    loader = iter(run.loader(samples, batch_samples=2 * BATCH, shuffle=False))

    def step() -> None:
        batch = next(loader)
        delay.at("script")
        run.train_batch(batch)

    return run.watch, step


def measure(
    make: Callable[[ExitStack], tuple[Any, Step]], cases: Sequence[tuple[int, str]]
) -> dict[str, Any]:
    """Train each case; return what the watches measured.

    Each case has an engine and a watch of its own, so that no step of another case is in its score.
    """
    found = {f"rank {late}, {place}": measure_case(make, late, place) for late, place in cases}
    each = list(found.values())
    return {
        **found,
        "imbalance": sum(case["imbalance"] for case in each),
        "all exposed": sum(case["all exposed"] for case in each),
        "coverage": min(case["coverage"] for case in each),
        "unmatched": sum(case["unmatched"] for case in each),
    }


def measure_case(
    make: Callable[[ExitStack], tuple[Any, Step]], late: int, place: str
) -> dict[str, Any]:
    """Train with one rank late in one place; return what its watch measured."""
    records: list[StepRecord] = []
    with ExitStack() as undo:
        watch, step = make(undo)
        watch.subscribe(records.append)
        for _ in range(WARM_UP_STEPS):
            step()
        wait_for(lambda: all_compared(watch, records, WARM_UP_STEPS))
        before = watch.snapshot()
        delay.rank, delay.place, delay.slept = late, place, []
        for _ in range(STEPS):
            step()
        delay.place = ""
        wait_for(lambda: has_scores(watch) and all_compared(watch, records, WARM_UP_STEPS + STEPS))
        after = watch.snapshot()
        watch.close()
    imbalance = (communication.COMM_CAUSE_SECONDS, "imbalance")
    return {
        "slept": delay.slept,
        "scores": by_label(after, communication.STRAGGLER_SCORE),
        "imbalance": after.value(*imbalance) - before.value(*imbalance),
        "all exposed": all_exposed(after) - all_exposed(before),
        "exposed_by_group": by_label(after, communication.COMM_EXPOSED_SECONDS),
        "own_by_phase": by_label(after, communication.COMM_OWN_EXPOSED_SECONDS),
        "coverage": after.value(communication.COMM_COVERAGE_RATIO),
        "unmatched": after.value(communication.EXCHANGE_FAILURES, "unmatched"),
        # The first is left out: it shows the time since the steps before, too.
        **of_steps(records[WARM_UP_STEPS + 1 : WARM_UP_STEPS + STEPS]),
    }


def of_steps(records: Sequence[StepRecord]) -> dict[str, Any]:
    return {
        "step_seconds": median(record.seconds for record in records),
        "exposed": [record.comm_exposed_seconds for record in records],
        # The shortest: on a busy machine a rank waits for the processor in any phase.
        "busy": {phase: min(busy_seconds(record, phase) for record in records) for phase in PHASES},
        "operations": sorted({op for record in records for op in record.collectives}),
    }


def busy_seconds(record: StepRecord, phase: str) -> float:
    blocked = record.comm_exposed_phase_seconds.get(phase, 0.0)
    return record.phase_seconds.get(phase, 0.0) - blocked


def by_label(snapshot: Snapshot, spec: MetricSpec) -> dict[str, float]:
    return {label: value for (label,), value in snapshot.values.get(spec, {}).items()}


def has_scores(watch: Any) -> bool:
    """Whether the ranks have compared the step times of this rank."""
    return bool(by_label(watch.snapshot(), communication.STRAGGLER_SCORE))


def all_compared(watch: Any, records: Sequence[StepRecord], num_steps: int) -> bool:
    """Whether the calls of all steps are compared: only then their exposed time is exported."""
    measured = sum(record.comm_exposed_seconds for record in records)
    exported = all_exposed(watch.snapshot())
    return len(records) == num_steps and exported >= 0.999 * measured - 1e-4


def all_exposed(snapshot: Snapshot) -> float:
    return sum(by_label(snapshot, communication.COMM_EXPOSED_SECONDS).values())


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until it holds on all ranks; what is missing after the limit fails the test."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    dist.barrier()


if __name__ == "__main__":
    deepspeed.init_distributed("gloo", verbose=False)
    functions = (dist.all_gather, dist.all_reduce, dist.broadcast)
    cases = [(int(case[0]), case[2:]) for case in sys.argv[2:]]
    waits = [late for late, _ in cases if late != dist.get_rank()]
    found: dict[str, Any] = {
        "cases": cases,
        "watch": measure(watched_only, cases),
        "run": measure(in_a_training_run, cases),
        "delay": DELAY_SECONDS,
        "total delay": DELAY_SECONDS * STEPS * len(waits),
    }
    found["restored"] = functions == (dist.all_gather, dist.all_reduce, dist.broadcast)
    Path(sys.argv[1], f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
