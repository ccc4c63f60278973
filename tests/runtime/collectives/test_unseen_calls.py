"""Tests of `unseen_calls.py`: collectives that no wrapper sees, with a given Flight Recorder."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.clock import FakeClock

from zerowatch.metrics.catalog.labels import OPS, PHASES
from zerowatch.runtime.collectives.groups import CollectiveCall
from zerowatch.runtime.collectives.unseen_calls import (
    MIN_PAUSE_SECONDS,
    FlightRecorder,
    UnseenCalls,
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
    assert not call.timed  # when it ended is not known


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

    flight = FlightRecorder(dump, now=clock)
    flight.read_for(unseen(group, 1), at_once=False)
    clock.seconds += 10 * MIN_PAUSE_SECONDS

    assert not flight.read_for(unseen(group, 1, counted_at=clock.seconds), at_once=False)
