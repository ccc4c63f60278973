"""Tests of gloo's own ways to count calls and to end them, in a world of one rank.

A thread that waits for a message must not lower the coverage, and a reduce_scatter has no future.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zerowatch.metrics.catalog.labels import OPS
from zerowatch.runtime.collectives import instrument
from zerowatch.runtime.collectives.groups import CollectiveCall
from zerowatch.runtime.collectives.instrument import CollectiveInstrumentation
from zerowatch.runtime.collectives.unseen_calls import num_unseen
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.phase_timer import PhaseTimer

PATIENCE_SECONDS = 60.0  # only ends a test that hangs
Open = Callable[[], CollectiveInstrumentation]


@pytest.fixture
def open_now(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens instrumentation of gloo's world group when it is called."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = CollectiveInstrumentation(FailOpen())

    def open_now() -> CollectiveInstrumentation:
        made.open()
        made.call_recorder.connect(PhaseTimer(), None)
        return made

    yield open_now
    made.close()
    dist.destroy_process_group()


class Messages:
    """Messages from another rank: `recv` returns once one has arrived, as gloo counts it at once.

    Attributes:
        counted: Set once the group has counted the call.
        arrived: Set once the message has arrived.
    """

    def __init__(self) -> None:
        self.counted, self.arrived = threading.Event(), threading.Event()

    def recv(self, tensor: torch.Tensor, src: int = 0, group: Any = None, tag: int = 0) -> int:
        dist.group.WORLD.barrier().wait()  # stands for a message, which one rank cannot have
        self.counted.set()
        assert self.arrived.wait(PATIENCE_SECONDS)
        return src


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Messages:
    made = Messages()
    for module in (dist, c10d):
        monkeypatch.setattr(module, "recv", made.recv)
    return made


@pytest.mark.parametrize("reductions", [0, 2])
def test_a_thread_that_waits_for_a_message_does_not_lower_the_coverage(
    open_now: Open, messages: Messages, reductions: int
) -> None:
    groups = open_now().call_recorder.groups
    for _ in range(50):
        dist.barrier()
    groups.drain_coverage()
    receiving = threading.Thread(target=lambda: dist.recv(torch.ones(1), 0))
    receiving.start()
    assert messages.counted.wait(PATIENCE_SECONDS)
    found = []
    for _ in range(3):
        for _ in range(reductions):
            dist.all_reduce(torch.ones(1))
        found.append((*num_unseen(groups).values(), groups.drain_coverage()))
    messages.arrived.set()
    receiving.join()
    dist.barrier()
    found.append((*num_unseen(groups).values(), groups.drain_coverage()))

    later = 1.0 if reductions else None
    assert found == [(0, 1.0), (0, later), (0, later), (0, 1.0)]


def test_a_message_that_began_before_a_drain_and_was_counted_after_it_is_complete(
    open_now: Open, messages: Messages
) -> None:
    collectives = open_now()
    groups = collectives.call_recorder.groups
    dist.barrier()
    group = groups.find(dist.group.WORLD)
    assert group is not None
    call = CollectiveCall(OPS.index("recv"), group, 4, torch.float32, 0)
    group.begin_count([call], dist.group.WORLD)
    before = groups.drain_coverage()
    messages.arrived.set()
    messages.recv(torch.ones(1))
    group.end_count([call])

    assert (before, groups.drain_counts()) == (1.0, [(group, 1, 1)])
    assert group.num_under_way() == 0


def test_calls_that_no_wrapper_sees_lower_the_coverage_while_a_thread_waits(
    open_now: Open, messages: Messages
) -> None:
    groups = open_now().call_recorder.groups
    dist.barrier()
    groups.drain_coverage()
    receiving = threading.Thread(target=lambda: dist.recv(torch.ones(1), 0))
    receiving.start()
    assert messages.counted.wait(PATIENCE_SECONDS)
    for _ in range(3):
        dist.group.WORLD.barrier().wait()
    unseen = num_unseen(groups)
    coverage = groups.drain_coverage()
    messages.arrived.set()
    receiving.join()

    assert list(unseen.values()) == [3]
    assert coverage == pytest.approx(1 / 4)


REDUCE_SCATTERS = {
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(
        torch.empty(8), torch.ones(8), async_op=True
    ),
    "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(8), [torch.ones(8)], async_op=True),
}


@pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*deprecated:FutureWarning")
@pytest.mark.parametrize("in_python", [False, True])
@pytest.mark.parametrize("name", REDUCE_SCATTERS)
def test_an_asynchronous_call_without_a_future_ends_when_the_script_waits(
    open_now: Open, monkeypatch: pytest.MonkeyPatch, name: str, in_python: bool
) -> None:
    if in_python:
        monkeypatch.setattr(instrument, "RecordedFunction", None)
    collectives = open_now()
    recorder = collectives.call_recorder
    first, second = REDUCE_SCATTERS[name](), REDUCE_SCATTERS[name]()
    first.wait()

    batch = recorder.drain()
    timed = [call.timed for call in batch.calls]
    second.wait()

    assert not collectives._fail_open.failures
    assert [(call.payload_bytes, call.sequence) for call in batch.calls] == [(32, 1), (32, 2)]
    assert timed == [True, False]
    assert all(call.timed for call in batch.calls)
    assert batch.calls[0].end_ns >= batch.calls[0].wait_ns >= batch.calls[0].start_ns > 0
    assert (batch.is_complete, recorder.groups.drain_coverage()) == (True, 1.0)
