"""Time that collectives block the compute stream, against a script's own measurement on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from gpu.rank_jobs import rank_variables, run_code
from servers.free_port import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

# A collective of a given duration: it sleeps on a stream of its own, as NCCL does.
STAND_IN = """
import time
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from zerowatch.runtime.collectives.comm_time import CommTimeCounter
from zerowatch.runtime.collectives.totals import StepCommTotals
from zerowatch.runtime.collectives.instrument import CollectiveInstrumentation
from zerowatch.runtime.common.fail_open import FailOpen
torch.cuda.set_device(0)
dist.init_process_group("nccl")
x = torch.ones(8, device="cuda")
_ = x + 1  # loads the kernel, which a capture must not do

def timed(cycles):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)

timed(10**7)  # the clocks rise
CYCLES_PER_MS = 10**9 / timed(10**9)

def busy(milliseconds):
    torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))

nccl = torch.cuda.Stream()

class Future:
    def __init__(self, done):
        self.done = done
    def wait(self):
        torch.cuda.current_stream().wait_event(self.done)

class Work(dist.Work):
    def __init__(self):
        super().__init__()
        self.done = nccl.record_event()
    def get_future(self):
        return Future(self.done)

def all_reduce(tensor, op=None, group=None, async_op=False):
    nccl.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(nccl):
        busy(50)
    if async_op:
        return Work()
    torch.cuda.current_stream().wait_stream(nccl)

dist.all_reduce = c10d.all_reduce = all_reduce
dist.Work.wait = lambda work: torch.cuda.current_stream().wait_event(work.done)
fail_open = FailOpen()
collectives = CollectiveInstrumentation(fail_open)
collectives.open()
collectives.call_recorder.connect(None, None)
compute, side = torch.cuda.current_stream(), torch.cuda.Stream()

def expect(exposed_ms, comm_ms):
    batch = collectives.call_recorder.drain()
    while not batch.settled():  # a synchronization would be a wait that counts
        time.sleep(0.001)
    batch.read_events(collectives.call_recorder.events)
    step = StepCommTotals()
    step.add(batch.calls, CommTimeCounter().measure(batch))
    found = step.exposed_seconds * 1e3, step.seconds * 1e3
    assert not fail_open.failures, fail_open.failures
    assert abs(found[0] - exposed_ms) <= 0.03 * comm_ms, found
    assert abs(found[1] - comm_ms) <= 0.03 * comm_ms, found
"""
# Two ranks on one device, which NCCL refuses: gloo takes CUDA tensors, and blocks the host.
TWO_RANKS = """
import time
import torch
import torch.distributed as dist
from zerowatch.runtime.collectives.comm_time import CommTimeCounter
from zerowatch.runtime.collectives.totals import StepCommTotals
from zerowatch.runtime.collectives.instrument import CollectiveInstrumentation
from zerowatch.runtime.common.fail_open import FailOpen
torch.cuda.set_device(0)
fail_open = FailOpen()
collectives = CollectiveInstrumentation(fail_open)
collectives.open()
dist.init_process_group("gloo")
collectives.call_recorder.connect(None, None)
x = torch.ones(1 << 16, device="cuda")
dist.all_reduce(x)
collectives.call_recorder.drain()
if dist.get_rank() == 1:
    time.sleep(0.3)
work = dist.all_reduce(x, async_op=True)
time.sleep(0.1)
began = time.perf_counter()
work.wait()
blocked = time.perf_counter() - began
dist.barrier()
batch = collectives.call_recorder.drain()
batch.calls.pop()  # the barrier
assert batch.settled()
batch.read_events(collectives.call_recorder.events)
step = StepCommTotals()
step.add(batch.calls, CommTimeCounter().measure(batch))
assert not fail_open.failures, fail_open.failures
assert batch.calls[0].group.backend == "gloo"
if dist.get_rank() == 0:
    assert blocked > 0.15, blocked
    off = abs(step.exposed_seconds - blocked)
    assert off < 0.03 * step.seconds, (step.exposed_seconds, blocked)
    assert step.seconds > 0.25
"""


def run(body: str) -> None:
    run_code(STAND_IN + body)


def test_a_call_holds_the_compute_stream_as_long_as_it_takes() -> None:
    run("""
busy(20)
dist.all_reduce(x)
expect(50, 50)
work = dist.all_reduce(x, async_op=True)
busy(20)
work.wait()
expect(30, 50)
work = dist.all_reduce(x, async_op=True)
busy(70)
work.wait()
expect(0, 50)
dist.all_reduce(x, async_op=True)
busy(20)
expect(0, 50)
""")


def test_an_unsampled_end_is_where_the_compute_stream_has_waited() -> None:
    run("""
collectives.call_recorder.is_sampled = False
work = dist.all_reduce(x, async_op=True)
busy(20)
work.wait()
expect(30, 50)
work = dist.all_reduce(x, async_op=True)
busy(70)
work.wait()
expect(0, 70)  # an upper bound: the call took 50
dist.all_reduce(x)
expect(50, 50)
""")


def test_a_side_stream_holds_the_compute_stream_where_that_joins_it() -> None:
    run("""
def on_side(**options):
    with torch.cuda.stream(side):
        return dist.all_reduce(x, **options)

on_side()
busy(20)
expect(0, 50)
torch.cuda.synchronize()
on_side()
busy(20)
compute.wait_stream(side)
expect(30, 50)
with torch.cuda.stream(side):
    on_side(async_op=True).wait()
busy(20)
compute.wait_stream(side)
expect(30, 50)
on_side()
done = side.record_event()
on_side()
busy(20)
compute.wait_event(done)
busy(100)
compute.wait_stream(side)
expect(30, 100)
on_side()
with torch.cuda.stream(side):
    busy(60)  # behind the collective
compute.wait_stream(side)
expect(50, 50)
""")


def test_a_host_that_waits_leaves_the_compute_stream_dry() -> None:
    run("""
for wait in (side.synchronize, torch.cuda.synchronize, lambda: side.record_event().synchronize()):
    with torch.cuda.stream(side):
        dist.all_reduce(x)
    busy(20)
    wait()
    busy(5)
    expect(30, 50)
with torch.cuda.stream(side):
    dist.all_reduce(x)
busy(80)
side.synchronize()
expect(0, 50)
""")


def test_a_join_in_a_captured_graph_is_left_alone_and_counted() -> None:
    run("""
graph = torch.cuda.CUDAGraph()
with torch.cuda.stream(side):
    dist.all_reduce(x)
with torch.cuda.stream(side):
    graph.capture_begin(capture_error_mode="thread_local")
    collectives.call_recorder.stream_waits.on_stream_sync(side)
    y = x + 1
    graph.capture_end()
graph.replay()
torch.cuda.synchronize()
assert collectives.call_recorder.dropped_in_capture == 1
assert not fail_open.failures, fail_open.failures
""")


def test_streams_and_events_get_their_names_back() -> None:
    run("""
collectives.close()
assert "hooked" not in torch.cuda.synchronize.__code__.co_name
for owner, names in ((torch.cuda.Stream, "wait_stream synchronize"),
                     (torch.cuda.Event, "record wait synchronize")):
    for name in names.split():
        assert vars(owner)[name].__code__.co_name == name
""")


def test_on_gloo_the_host_that_waits_for_cuda_tensors_is_blocked() -> None:
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_RANKS],
            stderr=subprocess.PIPE,
            text=True,
            env=rank_variables("cuda", rank, 2) | {"MASTER_PORT": port},
        )
        for rank in range(2)
    ]

    errors = [rank.communicate(timeout=120)[1] for rank in ranks]

    assert [rank.returncode for rank in ranks] == [0, 0], errors
