"""Microseconds that monitoring adds to a call of NCCL on the training thread: `FOLDER`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpu.jobs import engines

from zerowatch.runtime.collectives.instrument import CollectiveInstrumentation
from zerowatch.runtime.common import hot_path
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.phase_timer import PhaseTimer

CALLS, REPEATS, WARM_UP = 200, 40, 10


def synchronous(all_reduce: Callable[..., Any], x: torch.Tensor) -> None:
    all_reduce(x)


def asynchronous(all_reduce: Callable[..., Any], x: torch.Tensor) -> None:
    all_reduce(x, async_op=True).wait()


def seconds(call: Callable[..., None], all_reduce: Callable[..., Any], x: torch.Tensor) -> float:
    """Return the CPU seconds of this thread for CALLS calls."""
    began = time.thread_time_ns()
    for _ in range(CALLS):
        call(all_reduce, x)
    return (time.thread_time_ns() - began) / 1e9


def main() -> None:
    engines.meet()
    x, plain = torch.ones(1024, device=engines.device()), dist.all_reduce
    fail_open = FailOpen()
    collectives = CollectiveInstrumentation(fail_open)
    collectives.open()
    recorder = collectives.call_recorder
    recorder.connect(PhaseTimer(), None)
    found: dict[str, Any] = {}
    for name, call, is_sampled in (
        ("synchronous", synchronous, True),
        ("asynchronous, sampled", asynchronous, True),
        ("asynchronous, not sampled", asynchronous, False),
    ):
        recorder.is_sampled = is_sampled
        pairs = []
        for _ in range(WARM_UP + REPEATS):
            before = seconds(call, plain, x)
            after = seconds(call, dist.all_reduce, x)
            batch = recorder.drain()
            engines.synchronize()
            if batch.settled():
                batch.read_events(recorder.events)
            pairs.append((before, after))
        kept = pairs[WARM_UP:]
        found[name] = {
            "plain": statistics.median(before for before, _ in kept) / CALLS * 1e6,
            "added": statistics.median(after - before for before, after in kept) / CALLS * 1e6,
        }
    collectives.close()
    engines.report(
        {
            "microseconds": found,
            "in C": hot_path.IS_COMPILED,
            "failures": dict(fail_open.failures),
        }
    )


if __name__ == "__main__":
    main()
