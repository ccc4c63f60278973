"""Tests of how the end of an asynchronous call on a device is found, on a fake device.

Covers `call_recorder.py` and `event_pool.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes.cuda_streams import DeviceTensor
from fakes.device_rank import DeviceRank
from fakes.sleeping_collectives import FakeWork, FourRankGroup

from zerowatch.runtime.collectives.call_reader import backend_readers, torch_readers
from zerowatch.runtime.collectives.call_recorder import CallRecorder
from zerowatch.runtime.collectives.comm_time import CommTimeCounter
from zerowatch.runtime.collectives.groups import Groups
from zerowatch.runtime.common.phase_timer import PhaseTimer

SAMPLE_INTERVAL = 16
UNSAMPLED = 1


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceRank]:
    made = DeviceRank(monkeypatch)
    made.recorder.sample_interval = SAMPLE_INTERVAL
    yield made
    made.instrumentation.close()


@pytest.fixture
def unsampled(rank: DeviceRank) -> DeviceRank:
    rank.recorder.begin_step(UNSAMPLED)
    return rank


def sampled_steps(recorder: CallRecorder, steps: range) -> list[int]:
    chosen = []
    for step in steps:
        recorder.begin_step(step)
        if recorder.is_sampled:
            chosen.append(step)
    return chosen


def test_one_step_in_sixteen_is_sampled_without_a_period(rank: DeviceRank) -> None:
    chosen = sampled_steps(rank.recorder, range(16_000))

    assert len(chosen) == pytest.approx(16_000 / SAMPLE_INTERVAL, rel=0.01)
    assert UNSAMPLED not in chosen
    assert {later - step for step, later in itertools.pairwise(chosen)} == {8, 13, 21}


@pytest.mark.parametrize(("interval", "expected"), [(0, []), (1, [1, 2, 3])])
def test_no_step_or_each_step_can_be_sampled(
    rank: DeviceRank, interval: int, expected: list[int]
) -> None:
    rank.recorder.sample_interval = interval

    assert sampled_steps(rank.recorder, range(1, 4)) == expected


@pytest.mark.parametrize("step", [0, UNSAMPLED])
def test_no_stream_of_the_pool_waits_for_a_call(rank: DeviceRank, step: int) -> None:
    rank.recorder.begin_step(step)
    rank.begin(10)
    nccl = next(stream for stream in rank.cuda.pool if stream.busy_until)

    for _ in range(40):  # more than the pool has
        rank.begin(10).wait()

    assert [stream for stream in rank.cuda.pool if stream.busy_until] == [nccl]


def test_outputs_are_recorded_on_a_private_stream_in_sampled_steps_only(rank: DeviceRank) -> None:
    rank.begin(10).wait()
    sampled = list(rank.cuda.recorded_on)
    rank.recorder.begin_step(UNSAMPLED)

    rank.begin(10).wait()

    assert sampled == rank.cuda.private
    assert rank.cuda.recorded_on == sampled


def test_a_sampled_end_is_exact_whatever_the_pool_does_and_whenever_training_waits(
    rank: DeviceRank,
) -> None:
    for stream in rank.cuda.pool[2:]:
        stream.run(500)
    work = rank.begin(10)
    rank.compute.run(30)
    work.wait()

    (step,) = rank.steps()

    assert step.seconds == pytest.approx(0.010, abs=1e-8)
    assert step.exposed_seconds == 0
    assert not step.is_upper_bound


def test_sampled_ends_of_two_groups_are_exact(rank: DeviceRank) -> None:
    rank.begin(30)
    rank.begin(10, group=FourRankGroup("tp", "nccl"))
    rank.end_step()
    rank.host.elapse(1000)

    rank.steps()

    lengths = [(call.end_ns - call.start_ns) / 1e6 for call in rank.batches[0].calls]
    assert lengths == pytest.approx([30, 10], abs=1e-5)


def test_an_unsampled_end_is_where_training_has_waited(unsampled: DeviceRank) -> None:
    late, early = unsampled.begin(10), unsampled.begin(20)
    unsampled.compute.run(25)
    late.wait()
    early.wait()

    (step,) = unsampled.steps()

    assert step.exposed_seconds == pytest.approx(0.005, abs=1e-8)  # of early: this is exact
    assert step.seconds == pytest.approx(0.030, abs=1e-8)
    assert step.is_upper_bound
    assert step.totals()["all_reduce"].seconds == pytest.approx(0.025 + 0.030, abs=1e-8)


def test_calls_that_are_only_bounded_have_no_duration(unsampled: DeviceRank) -> None:
    work = unsampled.begin(10)
    unsampled.compute.run(25)
    work.wait()

    unsampled.steps()

    (sums,) = unsampled.period().sums
    assert (sums.calls, sums.seconds) == (1, [])


def test_a_synchronous_call_is_exact_in_every_step(unsampled: DeviceRank) -> None:
    unsampled.compute.run(5)
    unsampled.reduce(10)

    (step,) = unsampled.steps()

    assert step.seconds == pytest.approx(0.010, abs=1e-8)
    assert not step.is_upper_bound
    (sums,) = unsampled.period().sums
    assert sums.seconds == pytest.approx([0.010])


def test_a_call_behind_one_with_an_unknown_end_is_bounded_too(unsampled: DeviceRank) -> None:
    first = unsampled.begin(10)
    unsampled.reduce(5)
    unsampled.compute.run(20)
    first.wait()

    unsampled.steps()

    assert [call.is_bound for call in unsampled.batches[0].calls] == [True, True]


def test_calls_behind_one_that_nothing_waits_for_are_bounded(unsampled: DeviceRank) -> None:
    unsampled.begin(10)  # and drops its handle
    unsampled.reduce(5)

    unsampled.steps()

    assert [call.is_bound for call in unsampled.batches[0].calls] == [True, True]


def test_a_call_that_nothing_waits_for_is_not_counted_as_late(unsampled: DeviceRank) -> None:
    work = unsampled.begin(10)
    late = unsampled.begin(10)
    unsampled.compute.run(5000)
    late.wait()
    unsampled.end_step()
    unsampled.host.elapse(1000)

    assert unsampled.batches[0].expire() == 1  # of both, only the second was to end
    del work


def test_a_handle_that_is_dropped_without_a_wait_delays_no_step(unsampled: DeviceRank) -> None:
    unsampled.begin(10)  # and drops its handle

    (step,) = unsampled.steps()

    assert step.comm_seconds is None
    assert step.exposed_seconds == 0


def test_a_call_that_nobody_waits_for_delays_its_step_by_one(unsampled: DeviceRank) -> None:
    work = unsampled.begin(10)
    unsampled.end_step()
    unsampled.host.elapse(1000)
    before = unsampled.batches[0].settled()

    first, second = unsampled.steps()

    assert not before
    assert (first.comm_seconds, second.comm_seconds) == (None, 0)
    del work


def test_a_wait_in_the_next_step_bounds_the_end(unsampled: DeviceRank) -> None:
    work = unsampled.begin(10)
    unsampled.end_step()
    unsampled.compute.run(4)
    work.wait()

    first, _ = unsampled.steps()

    assert first.exposed_seconds == pytest.approx(0.006, abs=1e-8)
    assert first.comm_seconds == pytest.approx(0.010, abs=1e-8)


def test_a_wait_while_a_graph_is_captured_leaves_the_end_unknown(unsampled: DeviceRank) -> None:
    work = unsampled.begin(10)
    unsampled.cuda.capturing = True  # from here on the device refuses events
    work.wait()
    unsampled.cuda.capturing = False

    (step,) = unsampled.steps()

    assert step.comm_seconds is None


def test_without_private_streams_every_end_is_a_bound(
    rank: DeviceRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank.cuda, "private_stream", lambda: None)
    rank.begin(10).wait()

    (step,) = rank.steps()

    assert step.is_upper_bound
    assert rank.cuda.recorded_on == []


def test_a_call_on_another_device_than_the_current_is_not_timed(rank: DeviceRank) -> None:
    rank.recorder.connect(PhaseTimer(rank.host), None)
    rank.cuda.used_devices.clear()
    rank.cuda.current_index = 1  # the payload is on device 0

    rank.reduce(10)
    rank.begin(10).wait()
    rank.cuda.current_index = 0
    rank.reduce(5)

    (step,) = rank.steps()
    assert rank.cuda.used_devices == {0}
    assert step.totals()["all_reduce"].calls == 3
    assert step.seconds == pytest.approx(0.005, abs=1e-8)
    assert not rank.failures


def test_a_barrier_before_the_rank_has_chosen_its_device_creates_no_context_on_another(
    rank: DeviceRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = {"barrier": ["group", "async_op", "device_ids"]}
    barrier = dict(torch_readers(parameters.get))["barrier"]
    no_sequence = dataclasses.replace(barrier, use_group_sequence=False)
    rank.cuda.used_devices.clear()
    monkeypatch.setattr(rank.recorder.groups.world, "device_index", 3)

    calls = rank.recorder.on_call(no_sequence, (), {})

    assert [call.timed for call in calls or ()] == [False]
    assert rank.cuda.used_devices == set()


@pytest.mark.parametrize(
    ("current", "options", "is_timed"),
    [
        (0, {}, True),
        (0, {"device_ids": [0]}, True),
        (1, {}, False),
        (0, {"device_ids": [1]}, False),
    ],
)
def test_a_barrier_of_a_group_without_a_device_is_timed_on_the_device_of_the_events(
    rank: DeviceRank,
    monkeypatch: pytest.MonkeyPatch,
    current: int,
    options: dict[str, list[int]],
    is_timed: bool,
) -> None:
    barrier = dict(torch_readers({"barrier": ["group", "async_op", "device_ids"]}.get))["barrier"]
    monkeypatch.setattr(rank.recorder.groups.world, "device_index", None)
    rank.reduce(10)  # the events are on device 0
    rank.cuda.used_devices.clear()
    rank.cuda.current_index = current

    calls = rank.recorder.on_call(barrier, (), options)

    assert [call.timed for call in calls or ()] == [is_timed]
    assert rank.cuda.used_devices <= {0}


def test_a_first_barrier_of_a_group_without_a_device_creates_no_context(
    rank: DeviceRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = dict(torch_readers({"barrier": ["group", "async_op", "device_ids"]}.get))["barrier"]
    monkeypatch.setattr(rank.recorder.groups.world, "device_index", None)
    rank.recorder.stream_waits.device_index = None
    rank.cuda.used_devices.clear()

    calls = rank.recorder.on_call(barrier, (), {})

    assert [call.timed for call in calls or ()] == [False]
    assert rank.cuda.used_devices == set()


def reduce_on_host(rank: DeviceRank, milliseconds: float) -> None:
    future: torch.futures.Future[None] = torch.futures.Future()
    reader = dict(torch_readers({"all_reduce": ["tensor", "op", "group", "async_op"]}.get))[
        "all_reduce"
    ]
    calls = rank.recorder.on_call(reader, (torch.ones(8),), {})
    begin_ns = rank.host.now_ns
    rank.recorder.on_return(reader, calls, FakeWork(future, lambda: None), begin_ns, begin_ns)
    rank.host.elapse(milliseconds)
    future.set_result(None)


def test_a_tensor_in_host_memory_is_timed_by_the_host(rank: DeviceRank) -> None:
    records = rank.cuda.num_records
    reduce_on_host(rank, 10)

    (step,) = rank.steps()

    assert step.seconds == pytest.approx(0.010)
    assert rank.cuda.num_records == records


def test_calls_on_the_host_change_no_durations_on_the_device(rank: DeviceRank) -> None:
    rank.reduce(10)
    reduce_on_host(rank, 30)
    rank.reduce(20)

    rank.steps()

    (batch,) = rank.batches
    assert [call.group.backend for call in batch.calls] == ["nccl", "gloo", "nccl"]
    durations = [call.duration_ns / 1e6 for call in batch.calls]
    assert durations == [pytest.approx(10), pytest.approx(30), pytest.approx(20)]
    assert [call.sequence for call in batch.calls] == [1, 2, 3]


def begin_message(rank: DeviceRank) -> FakeWork:
    isend = dataclasses.replace(dict(backend_readers())["isend"], use_group_sequence=False)
    work = FakeWork(None, lambda: None)
    calls = rank.recorder.on_call(isend, (torch.ones(8).as_subclass(DeviceTensor), 1), {})
    rank.recorder.on_return(isend, calls, work, rank.host.now_ns, rank.host.now_ns)
    return work


def test_a_message_that_is_waited_for_before_its_batch_is_read_loses_no_other_call(
    rank: DeviceRank,
) -> None:
    rank.reduce(10)
    work = begin_message(rank)
    batch = rank.recorder.drain()
    rank.host.elapse(20)
    is_settled = batch.settled()
    rank.compute.run(50)  # the device is not at the wait yet
    work.wait()

    batch.read_events(rank.recorder.events)

    assert is_settled
    assert CommTimeCounter().measure(batch).seconds == pytest.approx(0.010)
    assert [(call.timed, call.is_lost) for call in batch.calls] == [(True, False), (False, False)]


def test_a_message_that_is_waited_for_while_its_batch_is_read_stays_untimed(
    rank: DeviceRank,
) -> None:
    work = begin_message(rank)
    batch = rank.recorder.drain()
    rank.host.elapse(10)
    batch.read_events(rank.recorder.events)

    work.wait()

    assert CommTimeCounter().measure(batch).seconds == 0
    assert [(call.timed, call.duration_ns) for call in batch.calls] == [(False, 0)]


@pytest.mark.parametrize(
    "synchronize",
    [
        lambda rank, done: rank.side.synchronize(),
        lambda rank, done: done.synchronize(),
        lambda rank, done: rank.cuda.synchronize(),
    ],
    ids=["stream", "event", "device"],
)
def test_a_thread_of_the_script_that_synchronizes_does_not_hold_training(
    rank: DeviceRank, synchronize: Callable[[DeviceRank, Any], None]
) -> None:
    with rank.on_side():
        rank.reduce(10)
        done = rank.side.record_event()
    saver = threading.Thread(target=synchronize, args=(rank, done))
    saver.start()
    saver.join()
    rank.compute.run(20)

    (step,) = rank.steps()

    assert step.exposed_seconds == 0


def test_replays_of_a_captured_graph_lower_the_coverage(
    rank: DeviceRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups = Groups()
        group = groups.find(dist.group.WORLD)
        assert group is not None
        group.on_device, group.device_index = True, 0
        monkeypatch.setattr(rank.recorder, "groups", groups)
        graph = rank.cuda.Graph()
        graph.capture_begin()
        for _ in range(3):
            rank.reduce(1)
        graph.capture_end()
        group.recorded = 0  # as after a drain: NCCL's group counts calls while they are captured
        before_replays = groups.drain_coverage()
        for _ in range(2):
            graph.replay()

        after_replays = groups.drain_coverage()
        graph.replay()
        group.recorded = 1  # the replay adds three calls to those counted
        beside_a_replay = groups.drain_coverage()
    finally:
        dist.destroy_process_group()

    assert before_replays is None
    assert after_replays == 0.0
    assert beside_a_replay == pytest.approx(1 / 3)
    assert groups.drain_coverage() is None
    assert not rank.failures
