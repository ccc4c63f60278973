"""Tests of `unseen_calls.py`: collectives that no wrapper sees, with a given Flight Recorder."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.clock import FakeClock

from zerowatch.metrics.catalog.labels import OPS, PHASES
from zerowatch.runtime.collectives.groups import CollectiveCall
from zerowatch.runtime.collectives.unseen_calls import (
    MIN_PAUSE_SECONDS,
    FlightRecorder,
    UnseenCallCounter,
    UnseenCalls,
    num_unseen,
)

BACKWARD = PHASES.index("backward")
ALL_REDUCE, REDUCE_SCATTER = OPS.index("all_reduce"), OPS.index("reduce_scatter")


class Group:
    """The record of a group of two ranks."""

    backend = "gloo"
    busy_until_ns = maybe_busy_until_ns = -(2**63)


def entry(number: int, name: str, elements: int, dtype: str = "Float") -> dict[str, Any]:
    return {
        "collective_seq_id": number,
        "process_group": ("0", "default_pg"),
        "profiling_name": name,
        "is_p2p": False,
        "input_sizes": [[elements]],
        "output_sizes": [[2, elements]],
        "input_dtypes": [dtype],
        "output_dtypes": [dtype],
    }


def unseen(group: Any, number: int, *, first: int = 1, counted_at: float = 0.0) -> UnseenCalls:
    return UnseenCalls(
        missing={group: number},
        names={group: "0"},
        ranges=[(group, BACKWARD, first, first + number - 1)],
        counted_at=counted_at,
    )


def recorder(entries: list[dict[str, Any]], clock: FakeClock | None = None) -> FlightRecorder:
    return FlightRecorder(lambda: {"entries": entries}, now=clock or FakeClock())


@pytest.mark.parametrize(
    ("name", "op", "payload_bytes"),
    [
        ("gloo:all_reduce", "all_reduce", 400),
        ("nccl:_all_gather_base", "all_gather", 800),  # the payload is the whole output
        ("nccl:_reduce_scatter_base", "reduce_scatter", 400),
        ("gloo:broadcast", "broadcast", 400),
        ("nccl:all_to_all", "all_to_all", 400),
    ],
)
def test_an_unseen_call_has_its_operation_bytes_and_phase(
    name: str, op: str, payload_bytes: int
) -> None:
    group = Group()
    flight = recorder([entry(1, name, 100)])
    step = unseen(group, 1)

    assert flight.read_for(step, at_once=False)
    (call,) = flight.end_step(step)

    assert OPS[call.op] == op
    assert call.payload_bytes == payload_bytes
    assert call.phase == BACKWARD
    assert call.group is group
    assert not call.timed  # when it ended is not known
    assert (call.is_lost, call.settled, call.dtype) == (True, True, torch.float32)


def test_calls_that_a_wrapper_recorded_are_not_counted_again() -> None:
    group: Any = Group()
    flight = recorder([entry(1, "gloo:all_reduce", 100), entry(2, "gloo:all_reduce", 7)])
    # gloo runs a reduce_scatter as an all_reduce, and the Flight Recorder has that.
    flight.add_recorded([CollectiveCall(REDUCE_SCATTER, group, 400, None, BACKWARD)])
    step = UnseenCalls({group: 1}, {group: "0"}, [(group, BACKWARD, 1, 2)], 0.0)

    flight.read_for(step, at_once=False)
    (call,) = flight.end_step(step)

    assert call.payload_bytes == 28


@pytest.mark.parametrize(
    "entries",
    [
        [entry(2, "gloo:all_reduce", 100)],  # the buffer has dropped the first
        [entry(1, "gloo:other", 100), entry(2, "gloo:all_reduce", 100)],
        [entry(1, "gloo:all_reduce", 1, "Mystery"), entry(2, "gloo:all_reduce", 100)],
        [],
    ],
)
def test_calls_that_cannot_all_be_identified_are_left_out(
    entries: list[dict[str, Any]],
) -> None:
    flight, step = recorder(entries), unseen(Group(), 2)

    flight.read_for(step, at_once=False)

    assert flight.end_step(step) == []


def test_a_step_without_unseen_calls_gets_none() -> None:
    assert recorder([]).end_step(None) == []


def test_the_flight_recorder_is_read_at_most_once_a_second_except_at_the_end() -> None:
    clock, group = FakeClock(), Group()
    flight = recorder([], clock)
    clock.seconds = 1.0
    assert flight.read_for(unseen(group, 1, counted_at=1.0), at_once=False)

    clock.seconds += MIN_PAUSE_SECONDS / 2
    late = unseen(group, 1, counted_at=clock.seconds)

    assert not flight.read_for(late, at_once=False)
    assert flight.read_for(late, at_once=True)


def test_a_slow_read_makes_the_pause_longer() -> None:
    clock, group = FakeClock(), Group()

    def dump() -> dict[str, Any]:
        clock.seconds += 0.1
        return {}

    flight = FlightRecorder(dump, now=clock, cpu_now=clock)
    flight.read_for(unseen(group, 1), at_once=False)
    clock.seconds += 10 * MIN_PAUSE_SECONDS

    assert not flight.read_for(unseen(group, 1, counted_at=clock.seconds), at_once=False)


@pytest.mark.parametrize(("seconds", "is_read"), [(19.9, False), (20.1, True)])
def test_reading_takes_at_most_one_two_hundredth_of_the_time(seconds: float, is_read: bool) -> None:
    clock, group = FakeClock(), Group()

    def dump() -> dict[str, Any]:
        clock.seconds += 0.1
        return {}

    flight = FlightRecorder(dump, now=clock, cpu_now=clock)
    began = clock.seconds
    flight.read_for(unseen(group, 1), at_once=False)
    clock.seconds = began + seconds

    assert flight.read_for(unseen(group, 1, counted_at=clock.seconds), False) is is_read


def test_a_read_that_waits_for_a_busy_machine_does_not_delay_the_next_one() -> None:
    clock, cpu, group = FakeClock(), FakeClock(), Group()

    def dump() -> dict[str, Any]:
        clock.seconds += 0.5  # of which it runs for a hundredth
        cpu.seconds += 0.005
        return {}

    flight = FlightRecorder(dump, now=clock, cpu_now=cpu)
    began = clock.seconds
    flight.read_for(unseen(group, 1), at_once=False)
    clock.seconds = began + 1.0

    assert flight.read_for(unseen(group, 1, counted_at=clock.seconds), at_once=False)


def test_calls_that_were_counted_before_the_last_read_need_no_other() -> None:
    clock, reads = FakeClock(), list[float]()

    def dump() -> dict[str, Any]:
        reads.append(clock.seconds)
        return {}

    flight = FlightRecorder(dump, now=clock)
    for counted_at in (1000.0, 999.0, 1000.0):
        assert flight.read_for(unseen(Group(), 1, counted_at=counted_at), at_once=False)

    assert reads == [1000.0]


@pytest.mark.parametrize(
    ("dtype", "itemsize"),
    [
        ("Double", 8),
        ("Half", 2),
        ("BFloat16", 2),
        ("Long", 8),
        ("Int", 4),
        ("Short", 2),
        ("Char", 1),
        ("Byte", 1),
        ("Bool", 1),
    ],
)
def test_the_bytes_of_an_unseen_call_are_those_of_its_dtype(dtype: str, itemsize: int) -> None:
    flight, step = recorder([entry(1, "gloo:all_reduce", 100, dtype)]), unseen(Group(), 1)
    flight.read_for(step, at_once=False)

    (call,) = flight.end_step(step)

    assert call.payload_bytes == 100 * itemsize


@pytest.mark.parametrize(
    ("changes", "payload_bytes"),
    [
        ({"input_sizes": [[3, 5], [7]]}, 4 * (15 + 7)),  # one dtype for all
        ({"input_sizes": [[3], [7]], "input_dtypes": ["Float", "Half"]}, 4 * 3 + 2 * 7),
        ({"input_sizes": [[]]}, 4),
    ],
)
def test_a_call_of_several_tensors_has_the_bytes_of_all(
    changes: dict[str, Any], payload_bytes: int
) -> None:
    flight = recorder([entry(1, "nccl:allreduce_coalesced", 1) | changes])
    step = unseen(Group(), 1)
    flight.read_for(step, at_once=False)

    (call,) = flight.end_step(step)

    assert (OPS[call.op], call.payload_bytes) == ("all_reduce", payload_bytes)


def test_the_recorders_of_nccl_and_of_other_backends_are_both_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, device = Group(), Group()
    of_all = [
        entry(1, "gloo:all_reduce", 5) | {"process_group": ("host", "")},
        entry(1, "gloo:broadcast", 7) | {"process_group": ("device", "")},  # numbered by gloo
        entry(2, "gloo:broadcast", 7) | {"process_group": ("device", "")},
    ]
    of_nccl = [entry(1, "nccl:all_reduce", 9) | {"process_group": ("device", "")}]
    for name, entries in {"_dump_fr_trace": of_all, "_dump_nccl_trace": of_nccl}.items():
        dump = pickle.dumps({"entries": entries})
        monkeypatch.setattr(
            torch._C._distributed_c10d, name, lambda *_, dump=dump: dump, raising=False
        )
    flight = FlightRecorder(now=FakeClock())
    step: Any = UnseenCalls(
        missing={host: 1, device: 1},
        names={host: "host", device: "device"},
        ranges=[(host, BACKWARD, 1, 1), (device, BACKWARD, 1, 2)],
        counted_at=0.0,
    )

    flight.read_for(step, at_once=False)
    calls = flight.end_step(step)

    assert [(OPS[call.op], call.group, call.payload_bytes) for call in calls] == [
        ("all_reduce", host, 20),
        ("all_reduce", device, 36),
    ]


@pytest.mark.parametrize("name", ["_dump_fr_trace", "_dump_nccl_trace"])
def test_a_call_that_two_recorders_have_or_only_one_is_counted_once(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    group, dump = Group(), pickle.dumps({"entries": [entry(1, "nccl:all_reduce", 9)]})
    both = {"_dump_fr_trace", "_dump_nccl_trace"}
    for one in both:
        monkeypatch.setattr(torch._C._distributed_c10d, one, lambda *_: dump, raising=False)
    found = []
    for missing in (set(), both - {name}):
        for one in missing:
            monkeypatch.delattr(torch._C._distributed_c10d, one)
        flight, step = FlightRecorder(now=FakeClock()), unseen(group, 1)
        flight.read_for(step, at_once=False)
        found.append([call.payload_bytes for call in flight.end_step(step)])

    assert found == [[36], [36]]


def test_a_barrier_has_no_payload_and_messages_are_left_out() -> None:
    message = entry(1, "nccl:all_reduce", 100) | {"is_p2p": True}
    flight = recorder([message, entry(2, "gloo:barrier", 0)])
    step = unseen(Group(), 1, first=2)
    flight.read_for(step, at_once=False)

    (call,) = flight.end_step(step)

    assert (OPS[call.op], call.payload_bytes, call.dtype) == ("barrier", 0, None)


def test_calls_of_several_groups_are_found_apart() -> None:
    one, other = Group(), Group()
    entries = [
        entry(3, "gloo:all_reduce", 5),
        entry(3, "gloo:broadcast", 7) | {"process_group": ("1", "")},
    ]
    flight = recorder(entries)
    step: Any = UnseenCalls(
        missing={one: 1, other: 1},
        names={one: "0", other: "1"},
        ranges=[(one, BACKWARD, 3, 3), (other, 0, 3, 3)],
        counted_at=0.0,
    )
    flight.read_for(step, at_once=False)

    calls = flight.end_step(step)

    assert [(OPS[call.op], call.group, call.phase) for call in calls] == [
        ("all_reduce", one, BACKWARD),
        ("broadcast", other, 0),
    ]


def test_a_recorded_call_of_an_earlier_step_does_not_stand_for_one_of_the_next() -> None:
    group: Any = Group()
    flight = recorder([entry(1, "gloo:all_reduce", 100)])
    flight.add_recorded([CollectiveCall(ALL_REDUCE, group, 400, None, BACKWARD)])
    flight.end_step(None)
    step = unseen(group, 1)

    flight.read_for(step, at_once=False)

    assert len(flight.end_step(step)) == 1


def test_unseen_calls_since_the_last_step_are_counted_by_rank_set() -> None:
    def group(
        key: str,
        counted: int | None,
        recorded: int,
        replayed: int = 0,
        under_way: int = 0,
        *,
        on_device: bool = False,
    ) -> Any:
        found = SimpleNamespace(recorded=recorded, replayed=replayed, num_issued=lambda: counted)
        found.on_device, found.num_under_way = on_device, lambda: under_way
        found.records, found.rank_set = lambda: [found], SimpleNamespace(key=key)
        return found

    known = [
        group("dp", 3, 1),
        group("dp", 2, 0),  # another group of the same ranks
        group("tp", 4, 4),
        group("tp", 1, 2),  # a call that is about to be issued
        group("pp", 2, 3, replayed=1),  # of a captured graph
        group("pp", 3, 2, under_way=1),  # a thread waits for a message
        group("gone", None, 0),
        group("fsdp", 9, 0, on_device=True),  # the host may be ahead of it
    ]

    assert num_unseen(SimpleNamespace(known=lambda: known)) == {"dp": 4, "tp": 0, "pp": 0}


class CountedGroup:
    """A process group that counts its calls, and its record."""

    counts_calls = True

    def __init__(self, name: str, number: int) -> None:
        self.group_name, self.number, self.seen_from = name, number, number
        self.recorded = 0

    def reference(self) -> Any:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self.number


class CountedGroups:
    """The groups of a process, of which the counts are drained."""

    def __init__(self, *groups: CountedGroup) -> None:
        self._groups = groups

    def known(self) -> list[CountedGroup]:
        return list(self._groups)

    def find(self, group: object) -> None: ...

    def drain_counts(self) -> list[tuple[CountedGroup, int, int]]:
        counts = []
        for group in self._groups:
            if group.number > group.seen_from:
                counts.append((group, group.number - group.seen_from, group.recorded))
            group.seen_from, group.recorded = group.number, 0
        return counts


def test_calls_that_no_wrapper_has_seen_have_their_numbers_and_phases() -> None:
    clock, ddp, quiet = FakeClock(), CountedGroup("ddp", 7), CountedGroup("quiet", 3)
    groups: Any = CountedGroups(ddp, quiet)
    counter = UnseenCallCounter(groups, now=clock)
    ddp.number = 10
    counter.mark(BACKWARD)
    counter.mark(2)
    ddp.number, quiet.number = 12, 5
    ddp.recorded, quiet.recorded = 1, 2
    counter.mark(3)

    unseen_calls, coverage = counter.take()

    assert unseen_calls == UnseenCalls(
        missing={ddp: 4},  # type: ignore[dict-item]
        names={ddp: "ddp"},  # type: ignore[dict-item]
        ranges=[(ddp, BACKWARD, 8, 10), (ddp, 3, 11, 12)],  # type: ignore[list-item]
        counted_at=1000.0,
    )
    assert coverage == pytest.approx(1 / 5)
    assert counter.take() == (None, None)


def test_a_group_that_does_not_count_its_calls_is_not_asked_where_a_phase_ends() -> None:
    class UncountedGroup(CountedGroup):
        counts_calls = False

        def _get_sequence_number_for_group(self) -> int:
            raise AssertionError

    groups: Any = CountedGroups(UncountedGroup("mpi", 0))
    counter = UnseenCallCounter(groups)

    counter.mark(BACKWARD)

    assert counter.take() == (None, None)


def test_calls_before_the_count_begins_again_are_not_counted() -> None:
    ddp = CountedGroup("ddp", 7)
    groups: Any = CountedGroups(ddp)
    counter = UnseenCallCounter(groups)
    ddp.number = 10
    counter.mark(BACKWARD)

    counter.begin()
    ddp.number, ddp.recorded = 11, 1
    counter.mark(BACKWARD)

    assert counter.take() == (None, 1.0)
