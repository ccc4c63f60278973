"""One rank of the bench of instructions: the steps of `training_thread`, counted by callgrind.

A step takes some 50 times as long under callgrind, so what depends on time would be in too many or
in too few of the counted steps. Therefore no memory and no coverage is read in them, or in each of
them. Python collects no garbage in them, and no thread is made to release the GIL.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from bench import gpt_training
from bench.monitoring_cost.training_thread_job import SETTINGS, FixedSteps, HookSwitch, pin, watched

from zerowatch.runtime.instrumentation import memory_hooks, step_collector

# A step under callgrind may look like a hang.
COUNTED = SETTINGS | {"hang": {"enabled": False}, "memory": {"detailed_sample_seconds": 86400.0}}
NEVER, EACH_STEP = 86400.0, 0.0  # seconds between two readings
# As large as the simulated cache, which replaces the lines that were used the longest time ago.
SWEEP_BYTES = 2**19
# The simulated caches are empty at first.
FILLING_STEPS = 2


def main() -> None:
    asked = gpt_training.arguments()
    steps, calls = asked["steps"], asked["calls"]
    sys.setswitchinterval(1000.0)
    job = FixedSteps(SWEEP_BYTES)
    pin(int(os.environ["RANK"]))
    gc.collect()
    gc.freeze()
    counter = Counter(asked["library"])
    tensor = torch.ones(64)
    with read_every(NEVER), watched(job, COUNTED, asked["settling_steps"]):
        hooks = HookSwitch()
        for arm in ("off", "watched", "off again", "watched again"):
            hooks.switch(on="watched" in arm)
            job.run(asked["settling_steps"])
            counter.count(arm, job.step, steps)
        for arm in ("calls, off", "calls, watched"):
            hooks.switch(on="watched" in arm)
            job.run(asked["settling_steps"])
            counter.count(arm, lambda: torch.distributed.all_reduce(tensor), calls)
        hooks.switch(on=True)
    with read_every(EACH_STEP), watched(job, COUNTED, asked["settling_steps"]):
        counter.count("read", job.step, steps)
    gpt_training.report({"arms": counter.arms})


@contextmanager
def read_every(seconds: float) -> Iterator[None]:
    """Let memory and coverage be read at this interval, by watches that are opened in the block."""
    with (
        mock.patch.multiple(memory_hooks, READING_SECONDS=seconds, FAR_READING_SECONDS=seconds),
        mock.patch.object(step_collector, "COVERAGE_SECONDS", seconds),
    ):
        yield


class Counter:
    """Lets callgrind count what this process does, and write it to a file for each arm.

    Attributes:
        arms: The arms and how often they ran, in the order of their files.
    """

    def __init__(self, library: str) -> None:
        self._library: Any = ctypes.CDLL(library)
        self.arms: list[tuple[str, int]] = []

    def count(self, arm: str, function: Callable[[], object], times: int) -> None:
        gc.collect()
        gc.disable()
        self._library.start()
        for _ in range(FILLING_STEPS):
            function()
        self._library.zero()
        for _ in range(times):
            function()
        self._library.dump(arm.encode())
        gc.enable()
        self.arms.append((arm, times))


if __name__ == "__main__":
    main()
