"""Asynchronous NCCL calls under monitoring: no other stream waits, and no memory is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu.rank_jobs import run_code

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

Record = Callable[[str, object], None]

START = """
import torch
import torch.distributed as dist
from gpu import probes
from zerowatch.runtime.collectives.instrument import CollectiveInstrumentation
from zerowatch.runtime.common.fail_open import FailOpen
torch.cuda.set_device(0)
dist.init_process_group("nccl")
x = torch.ones(1 << 20, device="cuda")
for _ in range(3):  # communicators, modules and the pool of streams
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
torch.cuda._sleep(1000)
torch.cuda.synchronize()
fail_open = FailOpen()
collectives = CollectiveInstrumentation(fail_open)

def monitor():
    collectives.open()
    collectives.call_recorder.connect(None, None)

def settle():
    batch = collectives.call_recorder.drain()
    torch.cuda.synchronize()
    assert batch.settled() and not fail_open.failures, fail_open.failures
"""


def test_no_stream_of_the_script_waits_for_a_call_because_of_monitoring(
    record_property: Record,
) -> None:
    found = run_code(
        START
        + """
streams = [torch.cuda.Stream() for _ in range(32)]  # all of torch's pool
for stream in streams:
    with torch.cuda.stream(stream):
        torch.empty(8, device="cuda").zero_()

def waiting():
    torch.cuda.synchronize()
    found = probes.streams_that_wait(
        streams, lambda: dist.all_reduce(x, async_op=True), lambda: torch.cuda._sleep(10**9))
    torch.cuda.synchronize()
    return found

waiting()
plain = waiting()
def with_callback():  # what monitoring must not do: shows that the probe finds it
    work = dist.all_reduce(x, async_op=True)
    work.get_future().add_done_callback(lambda _: None)
    return work
torch.cuda.synchronize()
callbacks = probes.streams_that_wait(streams, with_callback, lambda: torch.cuda._sleep(10**9))
torch.cuda.synchronize()
monitor()
sampled = waiting()
settle()
collectives.call_recorder.is_sampled = False
unsampled = waiting()
settle()
out(plain=plain, sampled=sampled, unsampled=unsampled, callbacks=callbacks)
"""
    )

    record_property("streams that wait", found)
    assert found["callbacks"] > found["plain"], "a callback makes none wait: this shows nothing"
    assert found["sampled"] <= found["plain"]
    assert found["unsampled"] <= found["plain"]


def test_outputs_are_free_for_the_next_allocation_except_in_sampled_steps(
    record_property: Record,
) -> None:
    found = run_code(
        START
        + """
part = torch.ones(64 << 20, device="cuda")

def held(begun=lambda work: None):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda._sleep(10**9)
    whole = torch.empty_like(part)
    work = dist.all_gather_into_tensor(whole, part, async_op=True)
    begun(work)
    work.wait()
    del work, whole
    stats = torch.cuda.memory_stats(0)
    left = stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]
    torch.cuda.synchronize()
    return left

held()
plain = held()
# what monitoring must not do in each step: shows that the probe finds it
callbacks = held(lambda work: work.get_future().add_done_callback(lambda _: None))
monitor()
sampled = held()
settle()
collectives.call_recorder.is_sampled = False
unsampled = held()
settle()
out(plain=plain, sampled=sampled, unsampled=unsampled, callbacks=callbacks)
"""
    )

    record_property("bytes kept after the wait", found)
    assert found["unsampled"] <= found["plain"]
    if found["plain"] > 0:
        pytest.skip("this torch itself keeps the outputs of asynchronous calls: this shows nothing")
    assert found["callbacks"] > 0, "a callback keeps nothing: this shows nothing"


def test_private_streams_are_made_and_a_thread_may_query_while_a_graph_is_captured() -> None:
    found = run_code("""
import threading, torch
from zerowatch.runtime.common import accelerator
torch.ones(1, device="cuda")
allowed = []
thread = threading.Thread(
    target=lambda: allowed.append(accelerator.current.prepare_thread(0)))
thread.start()
thread.join()
one, two = (accelerator.current.private_stream() for _ in range(2))
pool = {torch.cuda.Stream().cuda_stream for _ in range(64)}
out(allowed=allowed, private=one.cuda_stream != two.cuda_stream
    and not {one.cuda_stream, two.cuda_stream} & pool)
""")

    assert found == {"allowed": [True], "private": True}


def test_events_are_queried_by_the_runtime_s_own_function() -> None:
    found = run_code("""
import torch
from zerowatch.runtime.common import accelerator
torch.ones(1, device="cuda")
never, early, late = (torch.cuda.Event() for _ in range(3))
early.record()
torch.cuda.synchronize()
torch.cuda._sleep(2_000_000_000)
late.record()
torch.cuda.Event.query = lambda event: 1 / 0  # it holds the interpreter lock
accelerator.current.ask_driver()
passed = [accelerator.current.query_event(each) for each in (never, early, late)]
torch.cuda.synchronize()
out(passed=passed, at_the_end=accelerator.current.query_event(late))
""")

    assert found == {"passed": [True, True, False], "at_the_end": True}


@pytest.mark.parametrize("connections", [None, "1"], ids=["unset", "one connection"])
def test_a_kernel_does_not_wait_behind_a_private_stream_except_in_a_single_queue(
    record_property: Record, connections: str | None
) -> None:
    variables = {} if connections is None else {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    found = run_code(
        """
import torch
from zerowatch.runtime.common import accelerator
torch.cuda.set_device(0)
x = torch.ones(8, device="cuda")
_ = x + 1  # loads the kernels
torch.cuda._sleep(1000)
private, other = accelerator.current.private_stream(), torch.cuda.Stream()

def kernel_ms(marks, waits):
    torch.cuda.synchronize()
    begin, end, slept = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    begin.record()
    with torch.cuda.stream(other):
        torch.cuda._sleep(10**9)
        if marks:
            slept.record()
    if waits:
        private.wait_event(slept)
    _ = x + 1
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)

kernel_ms(True, True)
out(plain=kernel_ms(False, False), marked=kernel_ms(True, False), waited=kernel_ms(True, True),
    has_one_queue=accelerator.current.has_one_queue())
""",
        **variables,
    )

    record_property("milliseconds until a kernel has run", found)
    assert found["has_one_queue"] is (connections == "1")
    if not found["has_one_queue"]:  # zerowatch makes no private stream wait otherwise
        assert found["waited"] < found["plain"] + 100  # the other stream sleeps for some 500 ms
