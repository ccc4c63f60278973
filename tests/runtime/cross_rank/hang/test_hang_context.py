"""Tests of `HangContext`: what it reads of collectives and peers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes.cuda_streams import FakeCuda
from fakes.rank_sets import FakeGroup, FakeGroups
from fakes.scraper import eventually
from fakes.sleeping_collectives import ManualClock
from torch._C import _distributed_c10d

from zerowatch.metrics.catalog.labels import OPS, PHASES
from zerowatch.runtime.collectives.call_batch import CallBatch
from zerowatch.runtime.collectives.event_pool import EventPool
from zerowatch.runtime.collectives.groups import CollectiveCall, RankSet, StreamWait
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.cross_rank.exchange.rank_messages import Heartbeat
from zerowatch.runtime.cross_rank.hang import driver_calls, hang_context
from zerowatch.runtime.cross_rank.hang.hang_context import HangContext, flight_recorder_dump
from zerowatch.runtime.cross_rank.hang.hang_evidence import RankSetSummary

MS = 1_000_000
KEY = RankSet((0, 1)).key


class TwoRanks:
    """A process group as the instrumentation keeps it."""

    role = "dp"
    busy_until_ns = maybe_busy_until_ns = -(2**63)

    def __init__(self, rank_set: RankSet | None = None) -> None:
        self.rank_set = rank_set or RankSet((0, 1))
        self.rank_set.roles = ["dp"]

    def begin(self) -> CollectiveCall:
        call = CollectiveCall(
            OPS.index("all_reduce"), self, 4096, torch.float32, PHASES.index("backward")
        )
        self.rank_set.issued += 1
        call.sequence = self.rank_set.issued
        self.rank_set.recent.append(call)
        return call


class DeviceEvent:
    """A CUDA event, which no machine without a GPU can record."""

    def __init__(self, *, passed: bool) -> None:
        self.passed = passed

    def query(self) -> bool:
        return self.passed


class FakeThread:
    """What the comparison thread has read of the other ranks."""

    def __init__(self, *heartbeats: Heartbeat) -> None:
        self.peers = {heartbeat.rank: heartbeat for heartbeat in heartbeats}
        self.others_hang = False
        self.divergence: str | None = None
        self.announced: list[bool] = []

    def announce_hang(self, hangs: bool) -> None:
        self.announced.append(hangs)


@pytest.fixture
def group() -> TwoRanks:
    return TwoRanks()


def context_of(group: TwoRanks, thread: Any = None, **options: Any) -> HangContext:
    return HangContext(
        rank=0,
        groups=FakeGroups([group]),
        thread=thread or FakeThread(),
        fail_open=FailOpen(),
        folder=lambda: None,
        **options,
    )


def returned(call: CollectiveCall, *, end_ms: int = 7) -> CollectiveCall:
    call.start_ns, call.issued_ns, call.end_ns = 2 * MS, end_ms * MS, end_ms * MS
    return call


def states(group: TwoRanks) -> list[tuple[int, bool]]:
    """Return the numbers of the last calls, and whether each is in flight."""
    return [(call.sequence, call.in_flight) for call in context_of(group).last_calls() or ()]


def test_a_call_that_has_not_returned_is_in_flight(group: TwoRanks) -> None:
    returned(group.begin())
    group.begin()

    assert states(group) == [(1, False), (2, True)]


def test_a_call_skipped_in_a_graph_capture_is_not_in_flight_for_ever(group: TwoRanks) -> None:
    group.begin()  # was never recorded as returned
    returned(group.begin())

    assert states(group) == [(1, False), (2, False)]


def test_a_call_that_was_left_out_is_not_in_flight_and_nothing_waits_for_it(
    group: TwoRanks,
) -> None:
    CallBatch([group.begin(), group.begin()]).discard()  # captured in a graph

    (rank_set,) = context_of(group).rank_sets() or ()

    assert states(group) == [(1, False), (2, False)]
    assert not rank_set.is_waiting


def test_a_call_of_another_group_of_the_same_ranks_does_not_end_one(group: TwoRanks) -> None:
    group.begin()
    returned(TwoRanks(group.rank_set).begin())

    assert states(group) == [(1, True), (2, False)]


def test_an_asynchronous_call_is_in_flight_until_its_end_is_recorded(group: TwoRanks) -> None:
    call = returned(group.begin(), end_ms=0)

    before = states(group)
    call.end_ns = 9 * MS

    assert (before, states(group)) == ([(1, True)], [(1, False)])


def test_a_call_on_a_device_is_in_flight_until_its_event_has_passed(group: TwoRanks) -> None:
    for passed in (True, False):
        call = returned(group.begin())
        call.start_event = DeviceEvent(passed=True)
        call.end_event = DeviceEvent(passed=passed)

    assert states(group) == [(1, False), (2, True)]


def test_a_call_on_a_device_that_nothing_waits_for_yet_is_not_known_to_run(
    group: TwoRanks,
) -> None:
    first, second = returned(group.begin()), returned(group.begin())
    for call in (first, second):
        call.start_event, call.is_bound = DeviceEvent(passed=True), True
    second.stream_wait = StreamWait(DeviceEvent(passed=True), 1)

    assert states(group) == [(1, False), (2, True)]


def test_an_expired_device_call_is_still_in_flight(group: TwoRanks) -> None:
    call = returned(group.begin())
    call.start_event, call.end_event = DeviceEvent(passed=True), DeviceEvent(passed=False)
    call.timed = False
    call.settle()

    assert states(group) == [(1, True)]


def test_the_events_of_a_settled_call_are_not_queried_as_they_are_reused(group: TwoRanks) -> None:
    call = returned(group.begin())
    call.start_event = call.end_event = DeviceEvent(passed=False)
    call.settle()

    assert states(group) == [(1, False)]


def test_a_summary_has_all_fields_of_a_call(group: TwoRanks) -> None:
    returned(group.begin()).settle()

    (call,) = context_of(group).last_calls() or ()

    assert (call.key, call.role, call.sequence) == (group.rank_set.key, "dp", 1)
    assert (call.op, call.payload_bytes, call.dtype) == ("all_reduce", 4096, "float32")
    assert (call.phase, call.seconds) == ("backward", pytest.approx(0.005))


def test_the_time_of_a_call_that_has_not_settled_is_in_seconds(group: TwoRanks) -> None:
    returned(group.begin())
    returned(group.begin(), end_ms=0)

    ended, in_flight = context_of(group, now_ns=lambda: 3002 * MS).last_calls() or ()

    assert (ended.in_flight, ended.seconds) == (False, pytest.approx(0.005))
    assert (in_flight.in_flight, in_flight.seconds) == (True, pytest.approx(3.0))


def test_only_the_last_calls_are_listed_and_all_in_flight(group: TwoRanks) -> None:
    returned(group.begin(), end_ms=0)
    for _ in range(500):
        returned(group.begin())

    lines = states(group)

    assert lines[0] == (1, True)
    assert [number for number, _ in lines[1:]] == list(range(438, 502))


def test_activity_is_when_a_call_was_seen_to_start_or_end(group: TwoRanks) -> None:
    now = [100]
    context = context_of(group, now_ns=lambda: now[0])
    times = [context.last_activity_ns()]

    def check_at(moment: int) -> None:
        now[0] = moment
        times.append(context.last_activity_ns())

    check_at(200)
    call = group.begin()
    check_at(300)
    check_at(400)
    returned(call, end_ms=0)
    check_at(500)
    call.end_ns = 5 * MS
    check_at(600)
    call.settle()
    check_at(700)
    returned(group.begin())
    check_at(800)

    assert times == [100, 100, 300, 300, 500, 600, 600, 800]


def test_peers_are_all_other_ranks_with_a_heartbeat(group: TwoRanks) -> None:
    heartbeats = [
        Heartbeat(rank=rank, host="node", age_seconds=3.0, issued={KEY: 5}, pause="eval")
        for rank in (0, 1)
    ]

    peers = context_of(group, FakeThread(*heartbeats)).peers()

    assert peers == {1: heartbeats[1]}
    assert context_of(group, FakeThread(heartbeats[0])).peers() is None


def begun(group: TwoRanks) -> None:
    returned(group.begin())
    group.begin()


def ended(group: TwoRanks) -> None:
    begun(group)
    returned(group.rank_set.recent[-1])


def in_the_background(group: TwoRanks) -> None:
    returned(group.begin(), end_ms=0)


def before_a_message(group: TwoRanks) -> None:
    """A message between two members has no number, and may be sent by a thread of its own."""
    begun(group)
    message = returned(group.begin())
    message.sequence = 0
    group.rank_set.issued -= 1


def message_only(group: TwoRanks) -> None:
    group.begin().sequence = 0


IS_WAITING = {begun: True, in_the_background: True, before_a_message: True, ended: False}


@pytest.mark.parametrize(("issue", "is_waiting"), [*IS_WAITING.items(), (message_only, False)])
def test_a_rank_set_waits_while_its_last_numbered_collective_is_in_flight(
    group: TwoRanks, issue: Any, is_waiting: bool
) -> None:
    issue(group)

    (found,) = context_of(group).rank_sets() or ()

    assert (found.members, found.issued) == ((0, 1), group.rank_set.issued)
    assert found.is_waiting == is_waiting


def test_a_hang_and_its_end_are_announced_to_the_others(group: TwoRanks) -> None:
    thread = FakeThread()
    context = context_of(group, thread)

    context.announce_hang(True)
    context.announce_hang(False)

    assert thread.announced == [True, False]


def test_without_groups_there_was_no_activity() -> None:
    context = HangContext(
        rank=0,
        groups=FakeGroups([]),
        thread=FakeThread(),
        fail_open=FailOpen(),
        folder=lambda: None,
        now_ns=lambda: 100,
    )

    assert context.last_activity_ns() == 0


def test_a_rank_set_is_summarized_with_all_its_fields(group: TwoRanks) -> None:
    group.begin()

    assert context_of(group).rank_sets() == [
        RankSetSummary(key=KEY, role="dp", members=(0, 1), issued=1, is_waiting=True)
    ]


def test_a_rank_set_has_the_calls_that_no_wrapper_has_seen() -> None:
    group = FakeGroup((0, 1))
    group.num_unseen = 2

    [found] = context_of(group).rank_sets() or ()

    assert (found.issued, found.unseen) == (0, 2)


def test_what_the_comparison_found_is_passed_on(group: TwoRanks) -> None:
    thread = FakeThread()
    context = context_of(group, thread, is_training=lambda: False)
    before = (context.divergence(), context.others_hang())
    thread.divergence, thread.others_hang = "rank 1 diverged", True

    assert before == (None, False)
    assert (context.divergence(), context.others_hang()) == ("rank 1 diverged", True)
    assert context.is_training() is False
    assert context_of(group).is_training() is True


@pytest.mark.parametrize(
    ("device_index", "can_prepare", "prepared", "dump"),
    [(3, True, {"MainThread": 3}, b"{}"), (3, False, {}, None), (None, False, {}, b"{}")],
)
def test_a_thread_is_prepared_for_the_device_before_the_flight_recorder_asks_for_events(
    group: TwoRanks,
    monkeypatch: pytest.MonkeyPatch,
    device_index: int | None,
    can_prepare: bool,
    prepared: dict[str, int],
    dump: bytes | None,
) -> None:
    device = FakeCuda(ManualClock())
    device.patch(monkeypatch)
    device.can_prepare = can_prepare
    at_dump: list[dict[str, int]] = []
    asked: list[str] = []  # on CPU, the question would initialize a device
    monkeypatch.setattr(device, "ask_driver", lambda: asked.append("driver"))

    def dump_of_torch() -> bytes:
        at_dump.append(dict(device.prepared))
        return b"{}"

    monkeypatch.setattr(hang_context, "flight_recorder_dump", dump_of_torch)

    assert context_of(group, device_index=device_index).flight_recorder_dump() == dump
    assert at_dump == ([] if dump is None else [prepared])
    assert asked == (["driver"] if device_index is not None else [])


def unreached_event(device: FakeCuda) -> Any:
    device.current.run(20)
    return device.current.record_event()


@pytest.mark.parametrize("can_prepare", [True, False])
def test_a_thread_of_monitoring_is_prepared_before_it_asks_for_events_or_asks_for_none(
    group: TwoRanks, monkeypatch: pytest.MonkeyPatch, can_prepare: bool
) -> None:
    device = FakeCuda(ManualClock())
    device.patch(monkeypatch)
    device.can_prepare = can_prepare
    returned(group.begin()).end_event = unreached_event(device)
    context, found = context_of(group, device_index=3), []

    def look() -> None:
        found.extend(each.in_flight for each in context.last_calls() or ())
        found.extend(each.is_waiting for each in context.rank_sets() or ())

    run_on_thread("zerowatch-comparison", look)

    assert found == [can_prepare, can_prepare]
    assert device.prepared == ({"zerowatch-comparison": 3} if can_prepare else {})
    assert device.queried_by == ({"zerowatch-comparison"} if can_prepare else set())


def test_a_driver_that_blocks_is_asked_on_a_thread_of_its_own_and_not_waited_for(
    group: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeCuda(ManualClock())
    device.patch(monkeypatch)
    returned(group.begin()).end_event = unreached_event(device)
    released = threading.Event()

    def query(event: Any) -> bool:
        released.wait()
        return event.query()

    monkeypatch.setattr(device, "query_event", query)
    monkeypatch.setattr(driver_calls, "CALL_SECONDS", 0.01)
    monkeypatch.setattr(hang_context, "flight_recorder_dump", lambda: b"{}")
    context = context_of(group, device_index=3)
    context.start()
    try:
        assert eventually(lambda: device.prepared == {"zerowatch-hang-driver": 3})

        blocked = (context.rank_sets(), context.last_calls(), context.flight_recorder_dump())
        was_blocked = context.is_driver_blocked()
        released.set()

        assert blocked == (None, None, None)
        assert was_blocked
        assert eventually(lambda: not context.is_driver_blocked())
        monkeypatch.setattr(driver_calls, "CALL_SECONDS", 60.0)
        assert [each.is_waiting for each in context.rank_sets() or ()] == [True]
        assert [each.in_flight for each in context.last_calls() or ()] == [True]
        assert device.queried_by == {"zerowatch-hang-driver"}
        assert context.flight_recorder_dump() == b"{}"
    finally:
        released.set()
        context.close()
    assert not any(each.name == "zerowatch-hang-driver" for each in threading.enumerate())


@pytest.mark.parametrize("has_calls", [True, False], ids=["read calls", "no recorded calls"])
def test_the_flight_recorder_is_not_asked_if_the_driver_blocks_though_no_call_is_in_flight(
    group: TwoRanks, monkeypatch: pytest.MonkeyPatch, has_calls: bool
) -> None:
    device = FakeCuda(ManualClock())
    device.patch(monkeypatch)
    if has_calls:  # else they are all of DDP, which only the Flight Recorder knows
        call = returned(group.begin())
        call.start_event, call.end_event = (device.current.record_event() for _ in range(2))
        CallBatch([call], call.end_event).read_events(EventPool())
    released = threading.Event()
    monkeypatch.setattr(device, "query_event", lambda _: released.wait())
    monkeypatch.setattr(device, "ask_driver", released.wait)
    monkeypatch.setattr(driver_calls, "CALL_SECONDS", 60.0)
    monkeypatch.setattr(hang_context, "flight_recorder_dump", lambda: b"{}")
    context = context_of(group, device_index=3)
    context.start()
    try:
        assert eventually(lambda: device.prepared == {"zerowatch-hang-driver": 3})

        summary = (context.rank_sets(), context.last_calls())
        monkeypatch.setattr(driver_calls, "CALL_SECONDS", 0.01)
        dump = context.flight_recorder_dump()

        assert None not in summary
        assert dump is None
        assert device.prepared == {"zerowatch-hang-driver": 3}  # on a new thread this would block
    finally:
        released.set()
        context.close()


def test_a_failed_kernel_does_not_prevent_a_dump_of_the_flight_recorder(
    group: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeCuda(ManualClock())
    device.patch(monkeypatch)
    returned(group.begin()).end_event = unreached_event(device)
    device.is_broken = True
    monkeypatch.setattr(hang_context, "flight_recorder_dump", lambda: b"{}")
    context = context_of(group, device_index=3)

    assert [context.flight_recorder_dump() for _ in range(2)] == [b"{}", b"{}"]


def test_each_thread_of_monitoring_is_prepared_once(
    group: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeCuda(ManualClock())
    device.patch(monkeypatch)
    prepared: list[str] = []

    def prepare(index: int) -> bool:
        prepared.append(threading.current_thread().name)
        return True

    monkeypatch.setattr(device, "prepare_thread", prepare)
    context = context_of(group, device_index=3)

    for name in ("zerowatch-watch", "zerowatch-comparison"):
        run_on_thread(name, lambda: [context.rank_sets(), context.last_calls()])

    assert prepared == ["zerowatch-watch", "zerowatch-comparison"]


def test_a_rank_without_a_device_has_no_thread_that_asks_the_driver(group: TwoRanks) -> None:
    context = context_of(group)

    context.start()

    assert not any(each.name == "zerowatch-hang-driver" for each in threading.enumerate())
    assert len(context.rank_sets() or ()) == 1
    context.close()


def test_a_device_that_cannot_be_used_is_not_tried_again(
    group: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeCuda(ManualClock())
    device.patch(monkeypatch)
    tried: list[int] = []
    monkeypatch.setattr(device, "prepare_thread", tried.append)
    context = context_of(group, device_index=3)

    for _ in range(2):
        run_on_thread("zerowatch-watch", context.rank_sets)

    assert tried == [3]


def test_a_thread_of_the_script_keeps_its_device(
    group: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeCuda(ManualClock())
    device.patch(monkeypatch)
    context = context_of(group, device_index=3)

    context.rank_sets()
    run_on_thread("Thread-1", context.last_calls)

    assert device.prepared == {}


def run_on_thread(name: str, body: Callable[[], object]) -> None:
    thread = threading.Thread(target=body, name=name)
    thread.start()
    thread.join()


def test_a_method_that_fails_returns_none_and_the_others_work(group: TwoRanks) -> None:
    def broken() -> bool:
        raise RuntimeError("gone")

    fail_open = FailOpen()
    context = HangContext(
        rank=0,
        groups=FakeGroups([group]),
        thread=FakeThread(),
        fail_open=fail_open,
        folder=lambda: None,
        is_training=broken,
    )

    assert context.is_training() is None
    assert len(context.rank_sets() or ()) == 1
    assert fail_open.failures == {"hang training mode": 1}


@pytest.mark.parametrize(
    ("backend", "records", "found"),
    [
        ("gloo", {"fr": b'{"entries": [1]}', "nccl": b'{"entries": [2]}'}, b'{"entries": [1]}'),
        ("nccl", {"fr": b'{"entries": [1]}', "nccl": b'{"entries": [2]}'}, b'{"entries": [2]}'),
        ("nccl", {"fr": b'{"entries": [1]}', "nccl": b"{}"}, b'{"entries": [1]}'),
        ("nccl", {"fr": b"{}", "nccl": b"{}"}, None),
        (None, {"fr": b'{"entries": [1]}', "nccl": b'{"entries": [2]}'}, b'{"entries": [1]}'),
        (None, {}, None),
    ],
)
def test_the_flight_recorder_of_the_device_s_backend_comes_first(
    monkeypatch: pytest.MonkeyPatch,
    backend: str | None,
    records: dict[str, bytes],
    found: bytes | None,
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: backend is not None)
    monkeypatch.setattr(dist, "get_backend", lambda: "undefined")  # the script named none
    FakeCuda(ManualClock()).patch(monkeypatch)
    world = {"cuda": backend, "cpu": "gloo"}
    process_group = SimpleNamespace(
        _get_backend=lambda device: SimpleNamespace(name=lambda: world[device.type])
    )
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", process_group)
    for name in ("fr", "nccl"):
        full_name = f"_dump_{name}_trace_json"
        monkeypatch.delattr(_distributed_c10d, full_name, raising=False)
        if name in records:
            monkeypatch.setattr(
                _distributed_c10d, full_name, lambda name=name: records[name], raising=False
            )

    assert flight_recorder_dump() == found


def test_a_call_of_ours_is_marked_as_such(group: TwoRanks) -> None:
    own = TwoRanks(group.rank_set)
    own.role = "zerowatch"
    returned(group.begin())
    returned(own.begin())

    calls = context_of(group).last_calls() or ()

    assert [call.is_own for call in calls] == [False, True]


def test_the_time_of_a_call_that_has_not_returned_is_unknown(group: TwoRanks) -> None:
    group.begin()

    (call,) = context_of(group, now_ns=lambda: 3002 * MS).last_calls() or ()

    assert (call.in_flight, call.seconds) == (True, None)


def test_the_time_of_a_call_that_expired_is_unknown(group: TwoRanks) -> None:
    call = returned(group.begin())
    call.timed = False
    call.settle()

    (found,) = context_of(group).last_calls() or ()

    assert (found.in_flight, found.seconds) == (False, None)
