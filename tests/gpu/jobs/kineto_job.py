"""Compares times of collectives with kineto's kernels: `FOLDER`.

On one GPU a stand-in for NCCL sleeps on a stream of its own, as a group of one rank has no kernels.
On several, DeepSpeed trains with NCCL.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from gpu import probes
from gpu.jobs import engines
from gpu.jobs.phases_job import cycles_per_ms
from torch.distributed import distributed_c10d as c10d
from torch.profiler import ProfilerActivity, profile, record_function

import zerowatch
from zerowatch.runtime.collectives.comm_time import CommTimeCounter
from zerowatch.runtime.collectives.instrument import CollectiveInstrumentation
from zerowatch.runtime.collectives.totals import StepCommTotals
from zerowatch.runtime.common.fail_open import FailOpen

importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # before the profiler
CALL_MS, REPEATS = 30.0, 5
WIDTH, LAYERS, BATCH, WARM_UP, STEPS = 4096, 12, 64, 6, 12

STEP = "one step"  # an annotation
Kernel = tuple[str, int, probes.Span]


class Future:
    """The future of a call, which makes the current stream wait, as NCCL's does."""

    def __init__(self, done: torch.cuda.Event) -> None:
        self.done = done

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.done)


class Work(dist.Work):
    """The handle of a call. It has the `wait` of its base class, which monitoring wraps."""

    def __init__(self, done: torch.cuda.Event) -> None:
        super().__init__()
        self.done = done

    def get_future(self) -> Any:
        return Future(self.done)


class StandIn:
    """An all-reduce that takes CALL_MS on a stream of its own."""

    def __init__(self) -> None:
        self.rate, self.stream = cycles_per_ms(), torch.cuda.Stream()
        dist.all_reduce = c10d.all_reduce = self.all_reduce
        dist.Work.wait = lambda work: torch.cuda.current_stream().wait_event(work.done)

    def all_reduce(
        self, tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Work | None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.busy(CALL_MS)
        if async_op:
            return Work(self.stream.record_event())
        torch.cuda.current_stream().wait_stream(self.stream)
        return None

    def busy(self, milliseconds: float) -> None:
        torch.cuda._sleep(int(milliseconds * self.rate))


def synchronous(stand_in: StandIn, x: torch.Tensor) -> None:
    stand_in.busy(10)
    dist.all_reduce(x)
    stand_in.busy(10)


def waited_for_halfway(stand_in: StandIn, x: torch.Tensor) -> None:
    work = dist.all_reduce(x, async_op=True)
    stand_in.busy(CALL_MS / 2)
    work.wait()
    stand_in.busy(10)


def waited_for_when_done(stand_in: StandIn, x: torch.Tensor) -> None:
    work = dist.all_reduce(x, async_op=True)
    stand_in.busy(2 * CALL_MS)
    work.wait()
    stand_in.busy(10)


def two_at_once(stand_in: StandIn, x: torch.Tensor) -> None:
    first, second = dist.all_reduce(x, async_op=True), dist.all_reduce(x, async_op=True)
    stand_in.busy(CALL_MS)
    first.wait()
    second.wait()
    stand_in.busy(10)


CASES = (synchronous, waited_for_halfway, waited_for_when_done, two_at_once)


@contextmanager
def traced(kernels: list[Kernel]) -> Iterator[None]:
    """Append the kernels and copies that run within, and the annotations of steps.

    Each is its name, its stream, or -1 for an annotation, and its begin and end in seconds.
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        yield
        torch.cuda.synchronize()
    for event in profiler.profiler.kineto_results.events():
        begin, seconds = event.start_ns() / 1e9, event.duration_ns() / 1e9
        name, on_device = event.name(), event.device_type() == torch.autograd.DeviceType.CUDA
        # Annotations appear twice: on the host, and over the kernels that they contain.
        if on_device and name != STEP and not name.startswith("nccl:"):
            kernels.append((name, event.device_resource_id(), (begin, begin + seconds)))
        elif not on_device and name == STEP:
            kernels.append((name, -1, (begin, begin + seconds)))


def with_stand_in() -> dict[str, dict[str, float]]:
    stand_in, x = StandIn(), torch.ones(8, device="cuda")
    fail_open = FailOpen()
    collectives = CollectiveInstrumentation(fail_open)
    collectives.open()
    collectives.call_recorder.connect(None, None)
    found = {}
    for case in CASES:
        found[case.__name__] = compare(case, stand_in, x, collectives)
    collectives.close()
    if fail_open.failures:
        raise RuntimeError(f"hooks have failed: {fail_open.failures}")
    return found


def compare(
    case: Callable[[StandIn, torch.Tensor], None],
    stand_in: StandIn,
    x: torch.Tensor,
    collectives: CollectiveInstrumentation,
) -> dict[str, float]:
    case(stand_in, x)
    torch.cuda.synchronize()
    collectives.call_recorder.drain()
    kernels: list[Kernel] = []
    step, clock, batches = StepCommTotals(), CommTimeCounter(), []
    with traced(kernels):
        with torch.cuda.stream(stand_in.stream):
            stand_in.busy(1)  # the first kernel shows kineto's number of the stream
        for _ in range(REPEATS):
            case(stand_in, x)
            batches.append(collectives.call_recorder.drain())
            while not batches[-1].settled():  # a synchronization would be a wait that counts
                time.sleep(0.001)
    for batch in batches:
        batch.read_events(collectives.call_recorder.events)
        step.add(batch.calls, clock.measure(batch))
    spins = sorted((k for k in kernels if "spin" in k[0]), key=lambda kernel: kernel[2])
    of_calls = [span for _, stream, span in spins[1:] if stream == spins[0][1]]
    compute = [span for _, stream, span in spins[1:] if stream != spins[0][1]]
    return {
        "comm": step.seconds,
        "exposed": step.exposed_seconds,
        "kineto comm": probes.covered(of_calls),
        "kineto exposed": probes.exposed(of_calls, compute),
        "calls": len(of_calls),
    }


def with_nccl(stage: int) -> list[dict[str, float]]:
    engine = engines.make_engine(
        engines.layers(WIDTH, LAYERS), engines.ds_config(stage, bf16=True, overlap_comm=True)
    )
    settings = {**engines.QUIET, "sampling": {"exact_collectives_steps": 1}}
    watch = zerowatch.watch(engine, settings)
    records: list[Any] = []
    watch.subscribe(records.append)
    batch = torch.randn(BATCH, WIDTH, device=engine.device, dtype=torch.bfloat16)
    for _ in range(WARM_UP):
        engines.step(engine, batch)
    torch.cuda.synchronize()
    kernels: list[Kernel] = []
    with traced(kernels):
        for _ in range(STEPS):
            with record_function(STEP):
                engines.step(engine, batch)
                torch.cuda.synchronize()  # so that the kernels of a step lie within it
    watch.close()
    engines.give_up(engine)
    steps = sorted(span for name, _, span in kernels if name == STEP)
    found = []
    for record, (begin, end) in zip(records[WARM_UP:], steps, strict=True):
        within = [(name, s) for name, at, s in kernels if at >= 0 and begin <= s[0] < end]
        calls = [span for name, span in within if name.startswith("nccl")]
        compute = [span for name, span in within if not name.startswith("nccl")]
        found.append(
            {
                "comm": record.comm_seconds,
                "exposed": record.comm_exposed_seconds,
                "kineto comm": probes.covered(calls),
                "kineto exposed": probes.exposed(calls, compute),
            }
        )
    return found


if __name__ == "__main__":
    engines.meet()
    if dist.get_world_size() == 1:
        engines.report(with_stand_in())
    else:
        engines.report({f"stage {stage}": with_nccl(stage) for stage in (2, 3)})
