"""Trains on a link and writes the metrics of its collectives, as JSON per rank.

Usage: link_job.py FOLDER BUCKET_ELEMENTS WIDTH STEPS. It also times each all_reduce itself.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import zerowatch
from zerowatch.metrics.catalog import communication

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

LAYERS, BATCH = 4, 8


def make_engine(bucket: int, width: int):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
    return zerowatch.initialize(
        settings={
            "serve": {"enabled": False},
            "run_log": {"enabled": False},
            "cross_rank": {"interval_seconds": 1.0},
        },
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": bucket},
        },
    )[0]


class TimedAllReduce:
    """Stands for torch's all_reduce, and times each call for itself. zerowatch wraps it."""

    def __init__(self) -> None:
        self._all_reduce = dist.all_reduce
        self._durations: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call torch's function. The job makes no asynchronous calls."""
        began = time.perf_counter()
        try:
            return self._all_reduce(*args, **kwargs)
        finally:
            self._durations.append(time.perf_counter() - began)

    def median_seconds(self) -> float:
        """The median, over the calls, of the shortest duration over the ranks."""
        least = torch.tensor(self._durations, dtype=torch.float64)
        self._all_reduce(least, op=dist.ReduceOp.MIN)
        return median(least.tolist())


def main(folder: str, bucket: int, width: int, steps: int) -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    timed = dist.all_reduce = c10d.all_reduce = TimedAllReduce()
    engine = make_engine(bucket, width)
    latencies, bandwidths = [], []
    for _ in range(steps):
        now = engine.watch.snapshot()
        latencies.append(now.value(communication.COMM_LINK_LATENCY, "dp"))
        bandwidths.append(now.value(communication.COMM_BUS_BANDWIDTH, "all_reduce", "dp"))
        output = engine(torch.ones(BATCH, width))
        engine.backward(output.square().mean())
        engine.step()
    engine.watch.close()
    seen = engine.watch.snapshot()
    result = {
        name: {"/".join(labels): value for labels, value in seen.values.get(spec, {}).items()}
        for name, spec in (
            ("cause", communication.COMM_CAUSE_SECONDS),
            ("exposed", communication.COMM_EXPOSED_SECONDS),
            ("wait", communication.COMM_WAIT_SECONDS),
            ("bus", communication.COMM_BUS_BANDWIDTH),
            ("link_bandwidth", communication.COMM_LINK_BANDWIDTH),
            ("link_latency", communication.COMM_LINK_LATENCY),
            ("calls", communication.COLLECTIVE_CALLS),
            ("failures", communication.EXCHANGE_FAILURES),
        )
    }
    result["measured_latency"] = timed.median_seconds()
    result["usual_bandwidth"] = median(each for each in bandwidths if each is not None)
    known = [each for each in latencies if each is not None]
    result["usual_latency"] = median(known)
    result["known_ratio"] = len(known) / len(latencies)
    result["latencies"] = [*known, *result["link_latency"].values()]
    Path(folder, f"rank-{dist.get_rank()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
