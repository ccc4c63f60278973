"""One rank of the compression bench: sums the same values in each format; JSON on stdout."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import deepspeed
import torch
import torch.distributed as dist

from zerowatch.runtime.engine.compression.compressed_all_reduce import (
    CompressedAllReduce,
    run_collective_steps,
)
from zerowatch.runtime.engine.compression.encoding import FORMATS
from zerowatch.runtime.engine.compression.error_feedback import CompressionError

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

Arm = Callable[[], torch.Tensor]


def arms(values: torch.Tensor) -> dict[str, Arm]:
    """Return what is compared; each gives the sum over the ranks to all of them."""

    def as_it_is(dtype: torch.dtype) -> Arm:
        def run() -> torch.Tensor:
            total = values.to(dtype, copy=True)
            dist.all_reduce(total)
            return total.float()

        return run

    def coded(name: str) -> Arm:
        exchange = CompressedAllReduce(FORMATS[name], None, CompressionError())

        def run() -> torch.Tensor:
            result = torch.empty_like(values)
            run_collective_steps(exchange.all_reduce(values.clone(), result))
            return result

        return run

    return {
        "fp32 all_reduce": as_it_is(torch.float32),
        "bf16 all_reduce": as_it_is(torch.bfloat16),
        **{name: coded(name) for name in ("bf16", "fp16", "int8", "fp8")},
    }


def main(num_values: int, rounds: int) -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    values = torch.randn(num_values, generator=torch.Generator().manual_seed(dist.get_rank()))
    compared = arms(values)
    exact = compared["fp32 all_reduce"]()
    report = {
        name: {"seconds": [], "error": float((run() - exact).norm() / exact.norm())}
        for name, run in compared.items()
    }
    for _ in range(rounds):
        for name, run in compared.items():
            dist.barrier()
            began = time.perf_counter()
            run()
            report[name]["seconds"].append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        print("report " + json.dumps(report), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
