"""Collectives of a given duration, on a manual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from zerowatch.metrics.catalog.labels import OPS
from zerowatch.runtime.collectives.call_batch import CallBatch
from zerowatch.runtime.collectives.collective_table import wire_factor
from zerowatch.runtime.collectives.comm_time import CommTimeCounter
from zerowatch.runtime.collectives.groups import RankSet
from zerowatch.runtime.collectives.instrument import CollectiveInstrumentation
from zerowatch.runtime.collectives.totals import StepCommTotals
from zerowatch.runtime.common.fail_open import FailOpen

MS = 1_000_000


class FourRankGroup:
    """A group of four ranks as Groups keeps it."""

    __slots__ = (
        "backend",
        "busy_until_ns",
        "device_index",
        "maybe_busy_until_ns",
        "on_device",
        "rank_set",
        "recorded",
        "replayed",
        "role",
        "size",
    )

    def __init__(self, role: str = "dp", backend: str = "gloo") -> None:
        self.role, self.backend, self.size = role, backend, 4
        self.on_device = backend == "nccl"
        self.device_index = 0
        self.recorded = self.replayed = 0
        self.busy_until_ns = self.maybe_busy_until_ns = -(2**63)
        self.rank_set = RankSet(tuple(range(4)))

    def reference(self) -> object:
        return self

    def wire_factor(self, op: int, payload_bytes: int) -> float:
        return wire_factor(OPS[op], self.backend, self.size, payload_bytes)


class FourRankGroups:
    """Finds the group that a call names, else the world group."""

    def __init__(self, world: FourRankGroup) -> None:
        self.world = world
        self.on_host = FourRankGroup(world.role)
        self.on_host.rank_set = world.rank_set

    def find(self, group: object, **_: object) -> FourRankGroup:
        return group if isinstance(group, FourRankGroup) else self.world

    def host_record(self, known: FourRankGroup) -> FourRankGroup:
        return self.on_host


class ManualClock:
    """Host time in nanoseconds; advancing it runs the scheduled callbacks that are due."""

    def __init__(self) -> None:
        self.now_ns = 1000 * MS
        self._due: list[tuple[int, Callable[[], object]]] = []

    def __call__(self) -> int:
        return self.now_ns

    def at(self, when_ns: int, what: Callable[[], object]) -> None:
        self._due.append((when_ns, what))

    def elapse(self, milliseconds: float) -> None:
        self.reach(self.now_ns + int(milliseconds * MS))

    def reach(self, until_ns: int) -> None:
        while self._due and min(self._due, key=lambda due: due[0])[0] <= until_ns:
            due = min(self._due, key=lambda due: due[0])
            self._due.remove(due)
            self.now_ns = max(self.now_ns, due[0])
            due[1]()
        self.now_ns = max(self.now_ns, until_ns)


class FakeWork(dist.Work):
    """A handle; `wait` of the class is replaced, as the instrumentation wraps that of the class."""

    def __init__(self, future: Any, wait: Callable[[], None]) -> None:
        super().__init__()
        self.future, self.wait_for_end = future, wait

    def get_future(self) -> Any:
        return self.future


class SleepingCollectives:
    """Replaces gloo: an all_reduce takes `tensor[0]` ms, of which the issue `issue_ms`."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock, self.issue_ms = clock, 0.0

    def all_reduce(
        self, tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> FakeWork | None:
        end_ns = self.clock.now_ns + int(float(tensor[0]) * MS)
        if not async_op:
            self.clock.reach(end_ns)
            return None
        future: torch.futures.Future[None] = torch.futures.Future()
        self.clock.at(end_ns, lambda: future.set_result(None))
        self.clock.elapse(self.issue_ms)
        return FakeWork(future, lambda: self.clock.reach(end_ns))


def instrumentation_over(
    monkeypatch: Any, all_reduce: Callable[..., Any], clock: ManualClock, backend: str
) -> CollectiveInstrumentation:
    """Return open instrumentation around a stand-in for all_reduce, on a group of four ranks."""
    for module in (dist, dist.distributed_c10d):
        monkeypatch.setattr(module, "all_reduce", all_reduce)
    monkeypatch.setattr(dist.Work, "wait", lambda work: work.wait_for_end())
    for module in ("call_recorder", "instrument"):
        monkeypatch.setattr(f"zerowatch.runtime.collectives.{module}.perf_counter_ns", clock)
    fail_open = FailOpen()
    collectives = CollectiveInstrumentation(fail_open)
    monkeypatch.setattr(collectives, "fail_open", fail_open, raising=False)
    groups = FourRankGroups(FourRankGroup(backend=backend))
    monkeypatch.setattr(collectives.call_recorder, "groups", groups)
    collectives.open()
    return collectives


def add_up(
    batches: Iterable[CallBatch], collectives: CollectiveInstrumentation
) -> list[StepCommTotals]:
    """Add up each step's calls, all of which have ended, as the watch thread does."""
    measuring, steps = CommTimeCounter(), []
    for batch in batches:
        assert batch.settled()
        batch.read_events(collectives.call_recorder.events)
        steps.append(StepCommTotals())
        steps[-1].add(batch.calls, measuring.measure(batch))
    return steps
