"""Cost of monitoring on a GPU, in blocks of steps without and with it: `FOLDER SIZE STAGE`.

SIZE is "large", 1.2 billion parameters; "short", a model whose steps take some ten milliseconds and
wait for Python to launch kernels; or "tiny", for a CPU. The first and last blocks are without
monitoring. Two more blocks of "large" have exact ends of collectives in all steps and in none. In a
last block, each hook is timed.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from bench.gpt_training import VOCABULARY, TinyGpt
from bench.monitoring_cost.own_threads import cpu_seconds, own_threads
from bench.monitoring_cost.thread_cost_job import by_metric
from gpu.jobs import engines
from gpu.jobs.hook_times import on_training_threads, per_step, timed_hooks

import zerowatch
from zerowatch.metrics.catalog.devices import DEVICE_UTILIZATION

# Width, layers, tokens, samples, blocks with monitoring, steps that settle, steps of a block.
SIZES = {
    "large": (2048, 24, 1024, 4, 14, 4, 8),
    "short": (256, 8, 128, 4, 12, 30, 60),
    "tiny": (32, 2, 16, 2, 2, 1, 2),
}
SETTINGS = {"serve": {"port": 0}, "run_log": {"folder": "runs"}}


def block(
    steps: Callable[[int], None], settling: int, count: int, watch: Any = None
) -> dict[str, float]:
    """Return a step's seconds and what was used: peaks and retries of the allocator, our CPU time.

    Args:
        steps: Trains a number of steps.
        settling: Steps before those that are timed.
        count: Steps that are timed.
        watch: None without monitoring.
    """
    steps(settling)
    engines.synchronize()
    retries = 0
    if engines.ON_CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
    gc.collect()
    steps(2)  # the allocator settles
    engines.synchronize()
    used, began = used_by_us(watch), time.perf_counter()
    steps(count)
    engines.synchronize()
    seconds = time.perf_counter() - began
    found = {"seconds": seconds / count}
    for part, value in used_by_us(watch).items():
        found[f"{part} ms/s"] = 1e3 * (value - used.get(part, 0.0)) / seconds
    if engines.ON_CUDA:
        stats = torch.cuda.memory_stats()
        found["reserved"] = stats["reserved_bytes.all.peak"]
        found["allocated"] = stats["allocated_bytes.all.peak"]
        found["retries"] = stats["num_alloc_retries"] - retries
    return found


def used_by_us(watch: Any) -> dict[str, float]:
    """Return seconds of our threads by the kernel's clock, and of our hooks by their own clock."""
    if watch is None:
        return {}
    parts = by_metric(watch)
    threads = defaultdict[str, float](float)
    for thread_id, name in own_threads().items():
        threads[name] += cpu_seconds(os.getpid(), thread_id)
    return {
        **threads,
        "threads": sum(threads.values()),
        "hooks": parts.get("hooks", 0.0),
        "collectives": parts.get("collectives", 0.0),
    }


def main(size: str, stage: int) -> None:
    width, num_layers, tokens, samples, blocks, settling, count = SIZES[size]
    engines.meet()
    torch.manual_seed(0)
    with engines.device():
        model = TinyGpt(width, num_layers).to(torch.bfloat16)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    config = engines.ds_config(stage, bf16=True, overlap_comm=True, reduce_bucket_size=100_000_000)
    engine = engines.make_engine(model, config)
    rows = torch.randint(0, VOCABULARY, (samples, tokens + 1), device=engine.device)
    failures: dict[str, Any] = {}
    devices_read = set[str]()

    def steps(number: int) -> None:
        for _ in range(number):
            engine.backward(engine(rows))
            engine.step()

    def monitored(**settings: Any) -> dict[str, float]:
        watch = zerowatch.watch(engine, SETTINGS | settings)
        assert watch.address is not None  # a monitoring process has started by now
        found = block(steps, settling, count, watch)
        failures.update(engines.hook_failures(watch))
        series = watch.snapshot().values.get(DEVICE_UTILIZATION, {})
        devices_read.update(labels[0] for labels in series)
        watch.close()
        return found

    def timed_by_hook() -> dict[str, list[float]]:
        with timed_hooks() as times:
            watch = zerowatch.watch(engine, SETTINGS)
            steps(settling)
            before = on_training_threads(times)
            steps(3 * count)
            after = on_training_threads(times)
            watch.close()
        return per_step(before, after, 3 * count)

    steps(3)
    found: dict[str, list[Any]] = {"plain": [block(steps, settling, count)], "monitored": []}
    for _ in range(blocks):
        found["monitored"].append(monitored())
        found["plain"].append(block(steps, settling, count))
    exact = {
        str(interval): monitored(sampling={"exact_collectives_steps": interval})
        for interval in ((0, 1) if size != "short" else ())
    }
    more = {"parameters": num_parameters, "failures": failures, "devices": sorted(devices_read)}
    engines.report({**found, "exact": exact, "hooks": timed_by_hook(), **more})


if __name__ == "__main__":
    main(sys.argv[2], int(sys.argv[3]))
