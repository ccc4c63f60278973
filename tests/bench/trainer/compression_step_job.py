"""One rank of the compression bench: steps of one ZeRO-2 engine on a link, in each form by turns.

The compressor changes on the running engine. Writes JSON on stdout.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from zerowatch.runtime.engine.compression.gradient_compressor import GradientCompressor

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

ARMS: dict[str, tuple[str, bool] | None] = {
    "fp32": None,
    "fp32, asynchronous": ("plain", True),
    "int8": ("int8", False),
    "int8, asynchronous": ("int8", True),
}
LAYERS, BUCKET = 10, 500_000


def make_engine(width: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
    return deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-6),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "managed_gradient_accumulation": False,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": BUCKET},
        },
    )[0]


def seconds(engine: Any, batch: torch.Tensor) -> float:
    """Return how long forward, backward and the sums of one micro-batch take."""
    dist.barrier()
    began = time.perf_counter()
    engine.backward(engine(batch).square().mean())
    took = time.perf_counter() - began
    engine.step()
    return took


def main(width: int, rows: int, rounds: int) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    engine, batch = make_engine(width), torch.randn(rows, width)
    report: dict[str, list[float]] = {name: [] for name in ARMS}
    for turn in range(rounds + 1):
        for name, asked in ARMS.items():
            compressor = asked and GradientCompressor(asked[0], asynchronous=asked[1])
            undo = compressor.attach(engine) if compressor else None
            took = seconds(engine, batch)
            if turn:  # the first turn warms up
                report[name].append(took)
            if undo:
                undo()
    if dist.get_rank() == 0:
        print("report " + json.dumps(report), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
