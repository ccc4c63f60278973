"""Step time, peak reserved memory and retries with and without monitoring: `FOLDER SIZE STAGE`.

SIZE is "large", 1.2 billion parameters, or "tiny". Blocks of steps with and without monitoring
alternate in one process. Two more blocks have exact ends of collectives in all steps and in none.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from bench.gpt_training import VOCABULARY, TinyGpt
from gpu.jobs import engines

import zerowatch

# Width, layers, tokens, samples, blocks of each kind, steps of a block.
SIZES = {"large": (2048, 24, 1024, 4, 5, 8), "tiny": (32, 2, 16, 2, 2, 2)}
SETTINGS = {"serve": {"port": 0}, "run_log": {"folder": "runs"}}


def block(steps: Callable[[int], None], count: int) -> dict[str, float]:
    """Return a step's seconds, and the peaks and retries of the allocator, of a block."""
    steps(2)  # the allocator settles
    engines.synchronize()
    retries = 0
    if engines.ON_CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
    began = time.perf_counter()
    steps(count)
    engines.synchronize()
    found = {"seconds": (time.perf_counter() - began) / count}
    if engines.ON_CUDA:
        stats = torch.cuda.memory_stats()
        found["reserved"] = stats["reserved_bytes.all.peak"]
        found["allocated"] = stats["allocated_bytes.all.peak"]
        found["retries"] = stats["num_alloc_retries"] - retries
    return found


def main(size: str, stage: int) -> None:
    width, num_layers, tokens, samples, blocks, count = SIZES[size]
    engines.meet()
    torch.manual_seed(0)
    with engines.device():
        model = TinyGpt(width, num_layers).to(torch.bfloat16)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    config = engines.ds_config(stage, bf16=True, overlap_comm=True, reduce_bucket_size=100_000_000)
    engine = engines.make_engine(model, config)
    rows = torch.randint(0, VOCABULARY, (samples, tokens + 1), device=engine.device)

    def steps(count: int) -> None:
        for _ in range(count):
            engine.backward(engine(rows))
            engine.step()

    steps(3)
    found: dict[str, list[Any]] = {"plain": [], "monitored": []}
    for _ in range(blocks):
        found["plain"].append(block(steps, count))
        watch = zerowatch.watch(engine, SETTINGS)
        found["monitored"].append(block(steps, count))
        failures = engines.hook_failures(watch)
        watch.close()
    exact = {}
    for interval in (0, 1):
        sampling = {"sampling": {"exact_collectives_steps": interval}}
        watch = zerowatch.watch(engine, SETTINGS | sampling)
        exact[str(interval)] = block(steps, count)
        failures |= engines.hook_failures(watch)
        watch.close()
    engines.report({**found, "exact": exact, "parameters": num_parameters, "failures": failures})


if __name__ == "__main__":
    main(sys.argv[2], int(sys.argv[3]))
