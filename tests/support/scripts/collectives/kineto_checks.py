"""Measures communication by zerowatch and by Kineto, on two ranks; as `FOLDER STAGE...`.

Rank 0 writes both results to FOLDER/figures.json. `stages`: each step's comm seconds by the watch
and by PyTorch's profiler. `blocked`: a collective whose waits this script times itself.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import zerowatch
from zerowatch.runtime.collectives.comm_time import CommTimeCounter
from zerowatch.runtime.collectives.instrument import CollectiveInstrumentation
from zerowatch.runtime.collectives.totals import StepCommTotals
from zerowatch.runtime.common.fail_open import FailOpen

importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

QUIET = {"serve": {"enabled": False}, "run_log": {"enabled": False}}
STEPS, WARM_UP, LAYERS, WIDTH, BATCH = 40, 3, 6, 512, 256
# Delay of rank 1: long compared with the noise of a busy machine, and without work.
LATE_SECONDS = 0.12
TENSOR = 1 << 20  # of float32
REPETITIONS = 5  # at most
CLOSE = 0.01  # of the seconds: closer than the tests ask for


def compare_stages() -> dict[str, list[dict[str, float]]]:
    return {stage: compare_steps(int(stage)) for stage in sys.argv[2:]}


def compare_steps(stage: int) -> list[dict[str, float]]:
    """Return the figures of the watch and of the profiler for each step.

    `delay` is for how long this thread had to wait for a core: that may be in ours alone.
    """
    engine = make(stage)
    watch = zerowatch.watch(engine, QUIET)
    records: list[Any] = []
    watch.subscribe(records.append)
    batch = torch.ones(BATCH, WIDTH)
    delays = []
    for _ in range(WARM_UP):
        step(engine, batch)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(STEPS):
            before = run_delay_seconds()
            with record_function("one step"):
                step(engine, batch)
            delays.append(run_delay_seconds() - before)
    watch.close()
    engine.destroy()
    events = profiler.profiler.kineto_results.events()
    spans = sorted(span(event) for event in events if event.name() == "one step")
    gloo = [span(event) for event in events if event.name().startswith("gloo:")]
    compared = []
    for record, (begin, end), delay in zip(records[WARM_UP:], spans, delays, strict=True):
        calls = [one for one in gloo if begin <= one[0] < end]
        compared.append(
            {
                "ours": record.comm_seconds,
                "kineto": union_seconds(calls),
                "calls": len(calls),
                "our_calls": sum(totals.calls for totals in record.collectives.values()),
                "step": record.seconds,
                "delay": delay,
            }
        )
    return compared


def run_delay_seconds() -> float:
    """Return the seconds that this thread has waited for a core, if the kernel counts them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def make(stage: int) -> Any:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def step(engine: Any, batch: torch.Tensor) -> None:
    engine.backward(engine(batch).square().mean())
    engine.step()


def span(event: Any) -> tuple[int, int]:
    return event.start_ns(), event.start_ns() + event.duration_ns()


def union_seconds(intervals: Iterable[tuple[int, int]]) -> float:
    """Return the length of a union of intervals, by another algorithm than the watch's."""
    edges = sorted(edge for start, end in intervals for edge in ((start, 1), (end, -1)))
    covered, depth, since = 0, 0, 0
    for at, change in edges:
        covered += at - since if depth else 0
        depth, since = depth + change, at
    return covered / 1e9


class Stopwatch:
    """Times of a collective that this script measures: of its run, and of the wait for it."""

    def __init__(self) -> None:
        self.blocked = 0.0
        self.spans: list[tuple[int, int]] = []

    def issue(self, **options: Any) -> Any:
        tensor = torch.ones(TENSOR)
        began = time.perf_counter_ns()
        work = dist.all_reduce(tensor, **options)
        returned = time.perf_counter_ns()
        self.blocked += (returned - began) / 1e9
        if work is None:
            self.spans.append((began, returned))
        else:
            work.get_future().add_done_callback(
                lambda _: self.spans.append((began, time.perf_counter_ns()))
            )
        return work

    def wait(self, work: Any) -> None:
        began = time.perf_counter_ns()
        work.wait()
        self.blocked += (time.perf_counter_ns() - began) / 1e9


def waited_for_at_once(watch: Stopwatch, collectives: CollectiveInstrumentation) -> None:
    watch.wait(watch.issue(async_op=True))


def waited_for_halfway(watch: Stopwatch, collectives: CollectiveInstrumentation) -> None:
    work = watch.issue(async_op=True)
    time.sleep(LATE_SECONDS / 2)
    watch.wait(work)


def waited_for_when_done(watch: Stopwatch, collectives: CollectiveInstrumentation) -> None:
    work = watch.issue(async_op=True)
    time.sleep(2 * LATE_SECONDS)
    watch.wait(work)


def hidden_behind_matmul(watch: Stopwatch, collectives: CollectiveInstrumentation) -> None:
    work = watch.issue(async_op=True)
    matrix, until = torch.ones(256, 256), time.perf_counter() + LATE_SECONDS / 2
    while time.perf_counter() < until:
        matrix @ matrix
    watch.wait(work)


def two_waited_for_in_the_other_order(
    watch: Stopwatch, collectives: CollectiveInstrumentation
) -> None:
    first = watch.issue(async_op=True)
    second = watch.issue(async_op=True)
    time.sleep(LATE_SECONDS / 2)
    watch.wait(second)
    watch.wait(first)


def waited_for_in_the_next_step(watch: Stopwatch, collectives: CollectiveInstrumentation) -> None:
    work = watch.issue(async_op=True)
    BATCHES.append(collectives.call_recorder.drain())
    time.sleep(LATE_SECONDS / 2)
    watch.wait(work)


def never_waited_for(watch: Stopwatch, collectives: CollectiveInstrumentation) -> None:
    watch.issue(async_op=True)
    time.sleep(2 * LATE_SECONDS)


def synchronous(watch: Stopwatch, collectives: CollectiveInstrumentation) -> None:
    watch.issue()


CASES: tuple[Callable[[Stopwatch, CollectiveInstrumentation], None], ...] = (
    waited_for_at_once,
    waited_for_halfway,
    waited_for_when_done,
    hidden_behind_matmul,
    two_waited_for_in_the_other_order,
    waited_for_in_the_next_step,
    never_waited_for,
    synchronous,
)
BATCHES: list[Any] = []  # closed while their calls were under way


def compare_blocked() -> dict[str, dict[str, float]]:
    collectives = CollectiveInstrumentation(FailOpen())
    collectives.open()
    collectives.call_recorder.connect(None, None)
    compared = {case.__name__: best_agreement(case, collectives) for case in CASES}
    collectives.close()
    return compared


def best_agreement(
    case: Callable[[Stopwatch, CollectiveInstrumentation], None],
    collectives: CollectiveInstrumentation,
) -> dict[str, float]:
    """Return the figures of the repetition in which both agree best.

    A wrong figure is wrong each time. Between the two readings of one moment, a busy machine may
    run another process.
    """
    best, is_close = compare_case(case, collectives), torch.zeros(1)
    for _ in range(1, REPETITIONS):
        is_close.fill_(float(disagreement(best) < CLOSE * best["script_comm"]))
        dist.broadcast(is_close, 0)  # rank 0 writes its figures
        if is_close:
            break
        best = min(best, compare_case(case, collectives), key=disagreement)
    return best


def disagreement(found: dict[str, float]) -> float:
    """Return the seconds by which both disagree."""
    blocked = abs(found["exposed"] - found["script_exposed"])
    return abs(found["comm"] - found["script_comm"]) + blocked


def compare_case(
    case: Callable[[Stopwatch, CollectiveInstrumentation], None],
    collectives: CollectiveInstrumentation,
) -> dict[str, float]:
    """Return the figures of zerowatch and of this script for one case with a late rank 1."""
    dist.barrier()
    collectives.call_recorder.drain()
    BATCHES.clear()
    watch = Stopwatch()
    if dist.get_rank() == 1:
        time.sleep(LATE_SECONDS)
    case(watch, collectives)
    dist.barrier()
    BATCHES.append(collectives.call_recorder.drain())
    BATCHES[-1].calls.pop()  # the barrier
    comm, clock = StepCommTotals(), CommTimeCounter()
    for batch in BATCHES:
        assert batch.settled()
        comm.add(batch.calls, clock.measure(batch))
    return {
        "comm": comm.seconds,
        "exposed": comm.exposed_seconds,
        "script_comm": union_seconds(watch.spans),
        "script_exposed": watch.blocked,
    }


def main() -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    figures = {"blocked": compare_blocked(), "stages": compare_stages()}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).joinpath("figures.json").write_text(json.dumps(figures))
    dist.barrier()


if __name__ == "__main__":
    main()
