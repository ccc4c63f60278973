"""One rank of the overhead bench: blocks of steps with and without each tool, interleaved."""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
from bench import gpt_training

SETTINGS: dict[str, Any] = {"serve": {"port": 0}, "run_log": {"folder": "runs"}}


@contextlib.contextmanager
def off(engine: Any) -> Iterator[None]:
    yield


@contextlib.contextmanager
def watched(engine: Any) -> Iterator[None]:
    from zerowatch.runtime.entry_points import watch

    opened = watch(engine, SETTINGS)
    yield
    opened.close()


@contextlib.contextmanager
def comms_logger(engine: Any) -> Iterator[None]:
    """DeepSpeed's own; its timers are cleared after each block, or each op would cost more."""
    deepspeed.comm.configure(enabled=True, prof_all=True)
    yield
    deepspeed.comm.configure(enabled=False, prof_all=False)
    deepspeed.comm.comm.comms_logger.reset_data()
    deepspeed.comm.comm.timers.timers.clear()


@contextlib.contextmanager
def torch_profiler(engine: Any) -> Iterator[None]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        yield


ARMS: dict[str, Callable[[Any], contextlib.AbstractContextManager[None]]] = {
    "off": off,
    "off again": off,
    "watched": watched,
    "comms_logger": comms_logger,
    "torch.profiler": torch_profiler,
}


def main() -> None:
    asked = gpt_training.arguments()
    job = gpt_training.Training(stage=asked["stage"])
    job.aim_at(asked["step_seconds"])
    rounds = [
        {arm: block(job, arm, asked) for arm in order}
        for order in orders(asked["rounds"], asked["every_round"], asked["some_rounds"])
    ]
    gpt_training.report({"rounds": rounds, "batch": job.batch})


def orders(rounds: int, every_round: list[str], some_rounds: list[str]) -> Iterator[list[str]]:
    """Shuffle the arms of each round alike on all ranks; expensive arms come every 4th round."""
    shuffler = random.Random(1)
    for number in range(rounds):
        order = every_round + (some_rounds if number % 4 == 0 else [])
        shuffler.shuffle(order)
        yield order


def block(job: gpt_training.Training, arm: str, asked: dict[str, Any]) -> dict[str, float]:
    """Return a step's mean wall and CPU seconds; opening, settling and closing are not timed."""
    with ARMS[arm](job.engine):
        for _ in range(asked["settling_steps"]):
            job.step()
        gc.collect()
        cpu_begin = time.process_time()
        wall = job.time_steps(asked["block_steps"])
        cpu = (time.process_time() - cpu_begin) / asked["block_steps"]
    gc.collect()
    return {"wall": wall, "cpu": cpu}


if __name__ == "__main__":
    main()
