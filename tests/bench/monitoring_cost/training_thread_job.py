"""One rank of the bench of the training thread: blocks with and without monitoring, by turns."""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench import gpt_training
from bench.monitoring_cost import gil_holds
from bench.monitoring_cost.own_threads import cpu_seconds, own_threads
from bench.monitoring_cost.step_overhead_job import orders

SETTINGS: dict[str, Any] = {"serve": {"port": 0}, "run_log": {"folder": "runs"}}
OFF, OFF_AGAIN, WATCHED = ARMS = ["off", "off again", "watched"]


def main() -> None:
    asked = gpt_training.arguments()
    pin(int(os.environ["RANK"]))
    job = gpt_training.Training(stage=2)
    pin(int(os.environ["RANK"]))  # the threads that have been started since, too
    job.aim_at(asked["step_seconds"])
    open_seconds: list[float] = []
    rounds = [
        {arm: block(job, arm, asked, open_seconds) for arm in order}
        for order in orders(asked["rounds"], ARMS, [])
    ]
    gpt_training.report(
        {
            "rounds": rounds,
            "block_steps": asked["block_steps"],
            "batch": job.batch,
            "open_seconds": statistics.median(open_seconds),
            "holds": holds_of_own_threads(job, asked),
        }
    )


def pin(rank: int) -> None:
    """Pin all threads of this process to the core of this rank; a new thread inherits it."""
    cores = sorted(os.sched_getaffinity(os.getppid()))
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {cores[rank % len(cores)]})


def block(
    job: gpt_training.Training, arm: str, asked: dict[str, Any], open_seconds: list[float]
) -> dict[str, float]:
    """Return a step's seconds: wall, CPU of this thread, and of our threads a second of wall."""
    from zerowatch.runtime.entry_points import watch

    with contextlib.ExitStack() as undo:
        if arm == WATCHED:
            begin = time.perf_counter()
            opened = watch(job.engine, SETTINGS)
            open_seconds.append(time.perf_counter() - begin)
            undo.callback(opened.close)
        job.time_steps(asked["settling_steps"])
        gc.collect()
        threads = own_threads()
        before = cpu_of(threads)
        training = cpu_seconds(os.getpid(), threading.get_native_id())
        wall = job.time_steps(asked["block_steps"])
        training = cpu_seconds(os.getpid(), threading.get_native_id()) - training
        ours = cpu_of(threads) - before
    gc.collect()
    steps = asked["block_steps"]
    return {"wall": wall, "training": training / steps, "threads": ours / (wall * steps)}


def cpu_of(threads: dict[int, str]) -> float:
    return sum(cpu_seconds(os.getpid(), each) for each in threads)


def holds_of_own_threads(
    job: gpt_training.Training, asked: dict[str, Any]
) -> dict[str, list[float]] | str:
    """Return the CPU seconds of each hold of the GIL by thread, or why they are not known.

    The thread that samples takes time of the core, so this is no part of the other figures.
    """
    from zerowatch.runtime.entry_points import watch

    if (reason := gil_holds.missing()) is not None:
        return reason
    opened = watch(job.engine, SETTINGS)
    try:
        job.time_steps(asked["settling_steps"])
        threads = own_threads()
        with (
            tempfile.TemporaryDirectory() as folder,
            gil_holds.sampled_holds(Path(folder)) as holds,
        ):
            job.time_steps(asked["sampled_steps"])
    finally:
        opened.close()
    return {name: holds.get(thread, []) for thread, name in threads.items()}


if __name__ == "__main__":
    main()
