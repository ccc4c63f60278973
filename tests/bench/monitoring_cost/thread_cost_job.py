"""One rank of a monitored run that is scraped: the CPU time of zerowatch's threads."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import gpt_training
from bench.monitoring_cost.own_threads import cpu_seconds, ended_threads_seconds, own_threads

from zerowatch.metrics.catalog.overhead import WATCH_SECONDS
from zerowatch.runtime.entry_points import watch

HERE = Path(__file__).parent


def main() -> None:
    asked = gpt_training.arguments()
    job = gpt_training.Training(stage=2)
    job.aim_at(asked["step_seconds"])
    opened = watch(job.engine, {"serve": {"port": 0}})
    scraper = start("scrape_client.py", opened.address, asked["scrape_seconds"])
    try:
        job.time_steps(asked["settling_steps"])
        found = measure(job, opened, asked["steps"])
    finally:
        scraper.kill()
        scraper.wait()
    opened.close()
    gpt_training.report(found)


def measure(job: gpt_training.Training, opened: Any, num_steps: int) -> dict[str, Any]:
    threads = own_threads()
    poller = start("own_threads.py", os.getpid(), *threads)
    begin, kernel_says, we_say = time.perf_counter(), by_kernel(threads), by_metric(opened)
    step_seconds = job.time_steps(num_steps)
    seconds = time.perf_counter() - begin
    return {
        "step_seconds": step_seconds,
        "threads": rates(kernel_says, by_kernel(threads), seconds),
        "counted": rates(we_say, by_metric(opened), seconds),
        "longest_stretch_seconds": float(poller.communicate()[0]),
    }


def by_kernel(threads: dict[int, str]) -> dict[str, float]:
    found = {name: cpu_seconds(os.getpid(), each) for each, name in threads.items()}
    return found | {"threads of scrapes": ended_threads_seconds()}


def by_metric(opened: Any) -> dict[str, float]:
    parts = opened.snapshot().values.get(WATCH_SECONDS, {})
    return {part: value for (part,), value in parts.items()}


def rates(before: dict[str, float], after: dict[str, float], seconds: float) -> dict[str, float]:
    return {name: (after[name] - before.get(name, 0.0)) / seconds for name in after}


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    main()
