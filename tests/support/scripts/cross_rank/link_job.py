"""Trains on a link and writes the metrics of its collectives, as JSON per rank.

Usage: link_job.py FOLDER BUCKET_ELEMENTS WIDTH STEPS. It also times each all_reduce itself.
"""

from __future__ import annotations

import functools
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


class AllReduceTimes:
    """Times each call of torch's all_reduce by itself, inside of zerowatch's wrapper."""

    def __init__(self) -> None:
        original = self._all_reduce = dist.all_reduce
        calls = self._calls = list[tuple[int, float]]()  # bytes and seconds

        @functools.wraps(original)
        def timed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(tensor, *args, **kwargs)  # no call of the job is asynchronous
            finally:
                calls.append((tensor.nbytes, time.perf_counter() - began))

        dist.all_reduce = c10d.all_reduce = timed

    def measured(self) -> dict[str, float]:
        """The median duration of the calls, and the bus bandwidth of those with a whole bucket.

        The duration of a call is the shortest one over the ranks.
        """
        least = torch.tensor([seconds for _, seconds in self._calls], dtype=torch.float64)
        self._all_reduce(least, op=dist.ReduceOp.MIN)
        sizes, seconds = [size for size, _ in self._calls], least.tolist()
        largest = [each for each in zip(sizes, seconds, strict=True) if each[0] == max(sizes)]
        # Of two ranks, each sends as many bytes as the payload has.
        bandwidths = [size / duration for size, duration in largest]
        return {"latency": median(seconds), "bandwidth": median(bandwidths)}


def main(folder: str, bucket: int, width: int, steps: int) -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    times = AllReduceTimes()
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
    result["measured"] = times.measured()
    result["usual_bandwidth"] = median(each for each in bandwidths if each is not None)
    known = [each for each in latencies if each is not None]
    result["usual_latency"] = median(known)
    result["known_ratio"] = len(known) / len(latencies)
    result["latencies"] = [*known, *result["link_latency"].values()]
    Path(folder, f"rank-{dist.get_rank()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
