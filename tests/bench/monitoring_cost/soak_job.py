"""One rank of a long run of tiny steps: what it holds after the first steps and at the end."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import psutil
import torch
import torch.distributed as dist
from bench import gpt_training
from bench.monitoring_cost.scrape_client import scrape, series_of

SCRAPED_STEPS = 100


def main() -> None:
    asked = gpt_training.arguments()
    job = gpt_training.Training(stage=asked["stage"], width=16, layers=1, batch=1)
    opened = start_watch(job, asked["separate"]) if asked["watched"] else None
    address = None if opened is None else opened.address
    begin = time.perf_counter()
    run_steps(job, asked["first_steps"], address)
    while asked["first_seconds"] and agreed(time.perf_counter() - begin < asked["first_seconds"]):
        run_steps(job, SCRAPED_STEPS, address)
    early = held(address)
    run_steps(job, asked["steps"], address)
    late = held(address)
    seconds = time.perf_counter() - begin
    if opened is not None:
        opened.close()
    gpt_training.report({"early": early, "late": late, "seconds": seconds})


def start_watch(job: gpt_training.Training, separate: bool) -> Any:
    from zerowatch.runtime.entry_points import watch

    return watch(job.engine, {"serve": {"port": 0}, "process": {"separate": separate}})


def run_steps(job: gpt_training.Training, num_steps: int, address: str | None) -> None:
    """Train, and let a watched run be scraped about as often a step as a real one."""
    for number in range(num_steps):
        job.step()
        if address is not None and number % SCRAPED_STEPS == 0:
            scrape(address)


def agreed(more: bool) -> bool:
    """Return whether any rank wants more steps."""
    flag = torch.tensor(float(more))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def held(address: str | None) -> dict[str, Any]:
    gc.collect()
    process = psutil.Process()
    series = [] if address is None else series_of(scrape(address)[0])
    return {
        "resident_bytes": process.memory_info().rss,
        "separate_bytes": sum(child.memory_info().rss for child in process.children()),
        "series": series,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


if __name__ == "__main__":
    main()
