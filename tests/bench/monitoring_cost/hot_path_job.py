"""Times the recording around fakes that do nothing, so that only its own cost is left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bench import gpt_training
from torch.distributed import distributed_c10d as c10d

from zerowatch.runtime.collectives.call_batch import CallBatch
from zerowatch.runtime.collectives.instrument import CollectiveInstrumentation
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.phase_timer import PhaseTimer

CALLS = 200  # a step's worth; fewer than make a full batch
WARM_UP_REPEATS = 20


class FinishedWork:
    def __init__(self) -> None:
        self._future: torch.futures.Future[None] = torch.futures.Future()
        self._future.set_result(None)

    def get_future(self) -> torch.futures.Future[None]:
        return self._future


FINISHED = FinishedWork()


def all_reduce(tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
    return FINISHED if async_op else None


def main() -> None:
    asked = gpt_training.arguments()
    dist.init_process_group(
        asked["backend"], init_method=f"file://{os.environ['BENCH_STORE']}", rank=0, world_size=1
    )
    tensor = torch.ones(1024, device=asked["device"])
    dist.all_reduce = c10d.all_reduce = all_reduce
    collectives = CollectiveInstrumentation(FailOpen())
    collectives.open()
    collectives.call_recorder.connect(PhaseTimer(), lambda batch: None)
    found = {
        name: added_microseconds(collectives, tensor, asynchronous, asked["repeats"])
        for name, asynchronous in (("all_reduce", False), ("all_reduce, async", True))
    }
    collectives.close()
    gpt_training.report(found)


def added_microseconds(
    collectives: CollectiveInstrumentation, tensor: torch.Tensor, asynchronous: bool, repeats: int
) -> list[float]:
    """Return wrapped minus plain, per call, of each repeat; the two alternate."""
    added = []
    for _ in range(repeats + WARM_UP_REPEATS):
        plain, _ = per_call(all_reduce, tensor, asynchronous, list)
        drain = collectives.call_recorder.drain
        wrapped, batch = per_call(dist.all_reduce, tensor, asynchronous, drain)
        settle(collectives, batch)
        added.append(wrapped - plain)
    return sorted(added[WARM_UP_REPEATS:])


def per_call(
    function: Callable[..., Any],
    tensor: torch.Tensor,
    asynchronous: bool,
    at_step_end: Callable[[], Any],
) -> tuple[float, Any]:
    """Return the CPU microseconds of one call, and what is taken at a step's end."""
    begin = time.thread_time_ns()  # another process on the core does not count
    for _ in range(CALLS):
        function(tensor, async_op=asynchronous)
    taken = at_step_end()
    return (time.thread_time_ns() - begin) / CALLS / 1000, taken


def settle(collectives: CollectiveInstrumentation, batch: CallBatch) -> None:
    """Process a batch as the watch thread does, so that its events return to the pool."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if len(batch.calls) != CALLS or not batch.settled():
        raise AssertionError(f"recorded {len(batch.calls)} of {CALLS} calls, or lost an end")
    batch.read_events(collectives.call_recorder.events)


if __name__ == "__main__":
    main()
