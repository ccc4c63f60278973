"""Recorded collectives on NCCL: one GPU is a group of one, with real NCCL calls and streams."""

from __future__ import annotations

import pytest
import torch
from gpu.rank_jobs import run_code

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

START = """
import torch
import torch.distributed as dist
from zerowatch.metrics.catalog.labels import OPS
from zerowatch.runtime.collectives.instrument import CollectiveInstrumentation
from zerowatch.runtime.common import accelerator
from zerowatch.runtime.common.fail_open import FailOpen
torch.cuda.set_device(0)
fail_open = FailOpen()
collectives = CollectiveInstrumentation(fail_open)
collectives.open()
dist.init_process_group("nccl")
x = torch.ones(1 << 20, device="cuda")
dist.all_reduce(x)
dist.all_reduce(x, async_op=True).wait()
torch.cuda._sleep(1000)  # kernels are loaded at their first use, which may wait
torch.cuda.synchronize()
collectives.call_recorder.drain()
"""


def run(body: str) -> None:
    run_code(START + body)


def test_calls_are_timed_by_events_without_waiting_for_the_device() -> None:
    run("""
dist.all_reduce(x)
dist.all_reduce(x, async_op=True).wait()
batch = collectives.call_recorder.drain()
assert [OPS[call.op] for call in batch.calls] == ["all_reduce", "all_reduce"]
assert not fail_open.failures, fail_open.failures
torch.cuda.synchronize()
assert batch.settled()
batch.read_events(collectives.call_recorder.events)
for call in batch.calls:
    assert 0 < call.end_ns - call.start_ns < 1e9, (call.start_ns, call.end_ns)
""")


def test_an_interval_spans_the_work_queued_before_the_collective_only() -> None:
    run("""
torch.cuda._sleep(int(1e8))  # some 50 ms of work that comes before
dist.all_reduce(x)
batch = collectives.call_recorder.drain()
assert not batch.settled()
torch.cuda.synchronize()
batch.read_events(collectives.call_recorder.events)
(call,) = batch.calls
assert call.end_ns - call.start_ns < 20e6
""")


def test_a_captured_graph_is_left_alone_and_counted() -> None:
    run("""
stream = torch.cuda.Stream()
graph = torch.cuda.CUDAGraph()
with torch.cuda.stream(stream):
    dist.all_reduce(x)
torch.cuda.synchronize()
collectives.call_recorder.drain()
with torch.cuda.graph(graph, stream=stream):
    dist.all_reduce(x)
graph.replay()
torch.cuda.synchronize()
assert collectives.call_recorder.drain().calls == []
assert collectives.call_recorder.dropped_in_capture == 1
""")


def test_a_query_by_another_thread_leaves_a_capture_whole() -> None:
    run("""
import threading
dist.all_reduce(x)
batch = collectives.call_recorder.drain()
stop = threading.Event()
allowed = []
def query():
    allowed.append(accelerator.current.prepare_thread(x.device.index))
    while not stop.is_set():
        batch.settled()
thread = threading.Thread(target=query)
thread.start()
graph = torch.cuda.CUDAGraph()
y = torch.ones(8, device="cuda") + 1
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    for _ in range(200):
        y = y + 1
stop.set()
thread.join()
graph.replay()
torch.cuda.synchronize()
assert allowed == [True]
""")


def test_a_value_that_the_script_logs_leaves_a_capture_whole() -> None:
    run("""
import json, tempfile, threading
from pathlib import Path
from types import SimpleNamespace
from zerowatch.metrics.settings import load_settings
from zerowatch.runtime.monitor.watch_sinks import WatchSinks
folder, waits, is_capturing = Path(tempfile.mkdtemp()), threading.Event(), threading.Event()
def sleep(seconds):  # between two queries
    waits.set()
    assert is_capturing.wait(60)
sinks = WatchSinks(SimpleNamespace(identity=SimpleNamespace(rank=0), device_index=0,
    fail_open=fail_open, settings=load_settings({}), folder=lambda: folder), sleep=sleep)
loss = torch.full((), 2.5, device="cuda")
torch.cuda._sleep(int(1e9))
sinks.log_values({"loss": loss}, 1)
assert waits.wait(60)
graph = torch.cuda.CUDAGraph()
y = torch.ones(8, device="cuda")
with torch.cuda.graph(graph):
    y = y + 1
    is_capturing.set()
    sinks.close()  # the thread has queried again when it ends
    y = y + 1
graph.replay()
torch.cuda.synchronize()
assert y.tolist() == [3.0] * 8
assert json.loads((folder / "logged.jsonl").read_text())["values"] == {"loss": 2.5}
assert not fail_open.failures, fail_open.failures
""")


def test_calls_of_ddp_which_no_wrapper_sees_have_their_operation_and_bytes() -> None:
    run("""
from zerowatch.runtime.collectives.unseen_calls import FlightRecorder, UnseenCallCounter
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).to(x.device))
counter, flight = UnseenCallCounter(collectives.call_recorder.groups), FlightRecorder()
batch = torch.ones(8, 64, device=x.device)
for _ in range(3):  # DDP makes its buckets again after the first step
    model(batch).sum().backward()
counter.begin()
model(batch).sum().backward()
counter.mark(1)
unseen, coverage = counter.take()
assert flight.read_for(unseen, at_once=True)
calls = flight.end_step(unseen)
assert [(OPS[call.op], call.payload_bytes) for call in calls] == [("all_reduce", 4 * 65 * 64)]
assert coverage == 0.0
""")
