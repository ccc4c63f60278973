"""Ways in which the streams of a fake device wait for collectives, with the times to be found."""

from __future__ import annotations

from fakes.device_rank import DeviceRank


def synchronous_on_the_compute_stream(rank: DeviceRank) -> None:
    rank.compute.run(5)
    rank.reduce(10)


def waited_for_halfway(rank: DeviceRank) -> None:
    work = rank.begin(10)
    rank.compute.run(4)
    work.wait()


def waited_for_when_done(rank: DeviceRank) -> None:
    work = rank.begin(10)
    rank.compute.run(12)
    work.wait()


def waited_for_while_the_device_lags(rank: DeviceRank) -> None:
    rank.compute.run(100)
    work = rank.begin(10)
    rank.compute.run(4)
    work.wait()


def never_waited_for(rank: DeviceRank) -> None:
    rank.begin(10)
    rank.compute.run(5)


def two_waited_for_in_the_other_order(rank: DeviceRank) -> None:
    first, second = rank.begin(10), rank.begin(20)
    rank.compute.run(4)
    second.wait()
    first.wait()


def a_side_stream_that_nobody_joins(rank: DeviceRank) -> None:
    with rank.on_side():
        rank.reduce(10)
    rank.compute.run(3)


def a_side_stream_that_is_joined(rank: DeviceRank) -> None:
    with rank.on_side():
        rank.reduce(10)
    rank.compute.run(4)
    rank.compute.wait_stream(rank.side)
    rank.compute.run(1)
    rank.compute.wait_stream(rank.side)


def a_handle_waited_for_on_a_side_stream(rank: DeviceRank) -> None:
    with rank.on_side():
        rank.begin(10).wait()
    rank.compute.run(4)
    rank.compute.wait_stream(rank.side)


def a_copy_behind_the_collective(rank: DeviceRank) -> None:
    with rank.on_side():
        rank.reduce(10)
    rank.side.run(30)  # of the 34 that compute waits, 10 are communication
    rank.compute.wait_stream(rank.side)


def an_event_before_another_collective(rank: DeviceRank) -> None:
    with rank.on_side():
        rank.reduce(10)
        done = rank.side.record_event()
        rank.reduce(20)
    rank.compute.run(4)
    rank.compute.wait_event(done)
    rank.compute.run(50)
    rank.compute.wait_stream(rank.side)


def an_event_recorded_before_any_collective(rank: DeviceRank) -> None:
    early = rank.side.record_event()
    with rank.on_side():
        rank.reduce(10)
    rank.compute.wait_event(early)
    rank.compute.run(20)


def an_event_that_marks_something_else_by_now(rank: DeviceRank) -> None:
    other = rank.cuda.new_stream()
    with rank.on_side():
        rank.reduce(10)
        done = rank.side.record_event()
    other.run(30)
    done.record(other)
    rank.compute.wait_event(done)


def a_stream_that_joins_the_side_stream_for_us(rank: DeviceRank) -> None:
    between = rank.cuda.new_stream()
    with rank.on_side():
        rank.reduce(10)
    between.wait_stream(rank.side)
    rank.compute.run(4)
    rank.compute.wait_stream(between)


def a_side_stream_that_another_stream_joins_first(rank: DeviceRank) -> None:
    with rank.on_side():
        rank.reduce(10)
    rank.cuda.new_stream().wait_stream(rank.side)
    rank.compute.run(4)
    rank.compute.wait_stream(rank.side)


def the_host_waits_for_the_side_stream(rank: DeviceRank) -> None:
    with rank.on_side():
        rank.reduce(10)
    rank.compute.run(4)
    rank.side.synchronize()
    rank.compute.run(5)


def the_host_waits_for_an_event(rank: DeviceRank) -> None:
    with rank.on_side():
        rank.reduce(10)
        done = rank.side.record_event()
    rank.compute.run(4)
    done.synchronize()
    rank.compute.run(5)


def the_host_waits_for_the_device(rank: DeviceRank) -> None:
    with rank.on_side():
        rank.reduce(10)
    rank.compute.run(4)
    rank.cuda.synchronize()
    rank.compute.run(5)


def the_host_waits_while_compute_is_busy(rank: DeviceRank) -> None:
    with rank.on_side():
        rank.reduce(10)
    rank.compute.run(40)
    rank.side.synchronize()


# Each with the milliseconds for which it blocks the compute stream, and those of its calls.
CASES = [
    (synchronous_on_the_compute_stream, 10, 10),
    (waited_for_halfway, 6, 10),
    (waited_for_when_done, 0, 10),
    (waited_for_while_the_device_lags, 6, 10),
    (never_waited_for, 0, 10),
    (two_waited_for_in_the_other_order, 26, 30),
    (a_side_stream_that_nobody_joins, 0, 10),
    (a_side_stream_that_is_joined, 6, 10),
    (a_handle_waited_for_on_a_side_stream, 6, 10),
    (a_copy_behind_the_collective, 10, 10),
    (an_event_before_another_collective, 6, 30),
    (an_event_recorded_before_any_collective, 0, 10),
    (an_event_that_marks_something_else_by_now, 0, 10),
    (a_stream_that_joins_the_side_stream_for_us, 6, 10),
    (a_side_stream_that_another_stream_joins_first, 6, 10),
    (the_host_waits_for_the_side_stream, 6, 10),
    (the_host_waits_for_an_event, 6, 10),
    (the_host_waits_for_the_device, 6, 10),
    (the_host_waits_while_compute_is_busy, 0, 10),
]
