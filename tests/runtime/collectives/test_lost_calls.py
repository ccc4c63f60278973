"""Tests of calls whose times are lost, on a fake device: what is published, and what goes on.

Covers `call_recorder.py`, `groups.py` and `comm_time.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes.cuda_streams import DeviceTensor
from fakes.device_rank import DeviceRank
from fakes.sleeping_collectives import FakeWork
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from zerowatch.runtime.collectives.call_reader import CallReader, backend_readers, torch_readers
from zerowatch.runtime.collectives.groups import CollectiveCall, Group, Groups
from zerowatch.runtime.cross_rank.accounting.call_sequence import CallSequence

PAYLOAD = torch.ones(8).as_subclass(DeviceTensor)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceRank]:
    made = DeviceRank(monkeypatch)
    yield made
    made.instrumentation.close()


@pytest.fixture
def groups(rank: DeviceRank, monkeypatch: pytest.MonkeyPatch) -> Iterator[Groups]:
    """Groups of a world of one rank, on the fake device. Its process group counts its calls."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = Groups()
    group = made.find(dist.group.WORLD)
    assert group is not None
    group.on_device, group.device_index = True, 0
    monkeypatch.setattr(rank.recorder, "groups", made)
    yield made
    dist.destroy_process_group()


def reader_of(name: str) -> CallReader:
    def parameters(function: str) -> list[str] | None:
        found = getattr(c10d, function, None)
        return None if found is None else list(inspect.signature(found).parameters)

    return dict(torch_readers(parameters))[name]


def begin_message(rank: DeviceRank) -> FakeWork:
    isend = dataclasses.replace(dict(backend_readers())["isend"], use_group_sequence=False)
    work = FakeWork(None, lambda: None)
    calls = rank.recorder.on_call(isend, (PAYLOAD, 1), {})
    assert calls
    rank.recorder.on_return(isend, calls, work, rank.host.now_ns, rank.host.now_ns)
    return work


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def issue_on_group() -> None:
    dist.group.WORLD.allreduce([torch.zeros(1)])


def test_a_message_that_ends_on_another_device_stays_untimed_and_the_hooks_go_on(
    rank: DeviceRank,
) -> None:
    work = begin_message(rank)
    rank.recorder.events.release(rank.recorder.events.record())  # of device 0, for the next mark
    rank.cuda.current_index = 1
    work.wait()
    rank.cuda.current_index = 0
    rank.recorder.is_sampled = False
    later = rank.begin(10)
    rank.compute.run(4)
    later.wait()

    (step,) = rank.steps()

    assert not rank.failures
    assert [call.timed for call in rank.batches[0].calls] == [False, True]
    assert step.exposed_seconds == pytest.approx(0.006, abs=1e-8)


def test_a_message_that_ends_in_a_captured_graph_records_nothing_into_it(
    rank: DeviceRank,
) -> None:
    work = begin_message(rank)
    rank.cuda.capturing = True  # from here on the device refuses events
    work.wait()
    rank.cuda.capturing = False

    (step,) = rank.steps()

    assert not rank.failures
    assert (step.comm_seconds, step.is_exposed_known) == (None, False)


def test_ends_are_marked_again_after_a_wait_that_could_not_be_recorded(
    rank: DeviceRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA error: invalid resource handle")

    rank.recorder.is_sampled = False
    first = rank.begin(10)
    with monkeypatch.context() as patch:
        patch.setattr(rank.recorder.events, "record", refuse)
        first.wait()
    rank.end_step()
    rank.begin(10).wait()

    _, second = rank.steps()

    assert rank.failures["collectives"] > 0
    assert second.exposed_seconds == pytest.approx(0.010, abs=1e-8)


def test_without_events_a_step_has_no_times_of_communication(rank: DeviceRank) -> None:
    rank.recorder.events.disabled = True
    rank.begin(10).wait()
    rank.reduce(10)

    (step,) = rank.steps()

    assert (step.comm_seconds, step.is_exposed_known) == (None, False)
    assert step.totals()["all_reduce"].calls == 2
    assert [call.is_lost for call in rank.batches[0].calls] == [True, True]


def test_a_payload_on_another_device_leaves_the_times_of_the_step_unknown(
    rank: DeviceRank,
) -> None:
    rank.cuda.current_index = 1
    rank.reduce(10)
    rank.cuda.current_index = 0
    rank.end_step()
    rank.reduce(10)

    first, second = rank.steps()

    assert (first.comm_seconds, first.is_exposed_known) == (None, False)
    assert second.comm_seconds == pytest.approx(0.010, abs=1e-8)


def test_a_call_in_a_captured_graph_leaves_the_times_of_its_step_unknown(rank: DeviceRank) -> None:
    graph = rank.cuda.Graph()
    graph.capture_begin()
    rank.reduce(10)
    graph.capture_end()
    rank.end_step()
    rank.reduce(10)
    rank.end_step()
    graph.replay()

    captured, plain, replayed = rank.steps()

    assert plain.comm_seconds == pytest.approx(0.010, abs=1e-8)
    for step in (captured, replayed):
        assert (step.comm_seconds, step.is_exposed_known) == (None, False)


def test_a_step_that_ends_while_a_graph_is_captured_records_nothing_into_it(
    rank: DeviceRank,
) -> None:
    rank.reduce(10)
    rank.compute.run(5)
    rank.reduce(20)
    rank.cuda.capturing = True  # from here on the device refuses events
    rank.end_step()
    rank.cuda.capturing = False

    (step,) = rank.steps()[:1]

    assert step.seconds == pytest.approx(0.030)
    assert step.exposed_seconds == pytest.approx(0.030)
    assert not rank.failures


def test_without_an_end_before_the_capture_the_calls_of_the_step_are_lost(
    rank: DeviceRank,
) -> None:
    rank.recorder.sample_interval = 0
    rank.recorder.begin_step(1)
    work = rank.begin(10)
    rank.cuda.capturing = True
    rank.end_step()
    work.wait()
    rank.cuda.capturing = False
    rank.reduce(20)

    lost, step = rank.steps()

    assert [call.is_lost for call in rank.batches[0].calls] == [True]
    assert (lost.comm_seconds, lost.is_exposed_known) == (None, False)
    assert step.exposed_seconds == pytest.approx(0.020)  # the events go on
    assert not rank.failures


def test_a_captured_call_that_counts_by_the_group_s_sequence_keeps_the_coverage(
    rank: DeviceRank, groups: Groups
) -> None:
    for _ in range(50):
        issue_on_group()
    groups.drain_coverage()
    rank.cuda.capturing = True
    captured = rank.recorder.on_call(reader_of("reduce_scatter"), (PAYLOAD, [PAYLOAD]), {})
    rank.cuda.capturing = False
    for _ in range(3):
        issue_on_group()
        groups.find(dist.group.WORLD).recorded += 1

    assert captured is None
    assert groups.drain_coverage() == 1.0


@pytest.mark.parametrize("name", ["reduce_scatter", "all_reduce"])
def test_a_call_that_meets_a_full_device_does_not_stop_the_comparison_of_ranks(
    rank: DeviceRank, groups: Groups, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    group = groups.find(dist.group.WORLD)
    sequence = CallSequence(group.rank_set, from_now=False)
    with monkeypatch.context() as patch:
        patch.setattr(rank.recorder.events, "record", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            rank.recorder.on_call(reader_of(name), (PAYLOAD, [PAYLOAD]), {})
    recorded = group.recorded
    rank.reduce(10)
    (step,) = rank.steps()

    report = sequence.drain_report()

    assert recorded >= 0
    assert (len(report.signatures), len(report.durations)) == (2, 2)
    assert (step.comm_seconds, step.is_exposed_known) == (None, False)


def test_a_call_whose_end_cannot_be_recorded_does_not_stop_the_comparison_of_ranks(
    rank: DeviceRank, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = groups.find(dist.group.WORLD)
    sequence = CallSequence(group.rank_set, from_now=False)

    def refuse(*_: object) -> Any:
        raise RuntimeError("unknown API")

    with monkeypatch.context() as patch:
        patch.setattr(rank.recorder, "_mark_end", refuse)
        for _ in range(2):
            rank.reduce(10)
    rank.reduce(10)
    rank.steps()

    report = sequence.drain_report()

    assert rank.failures["collectives"] == 2
    assert (len(report.signatures), len(report.durations)) == (3, 3)


def test_a_rank_that_changes_its_device_gets_private_streams_there(rank: DeviceRank) -> None:
    class SecondDevice(DeviceTensor):
        def get_device(self) -> int:
            return 1

    rank.begin(10).wait()
    rank.cuda.current_index = 1
    rank.recorder.connect(rank.phases, None)
    compute = rank.cuda.current
    script = compute.busy_until
    work = dist.all_reduce(torch.tensor([10.0]).as_subclass(SecondDevice), async_op=True)
    before_the_wait = compute.busy_until
    work.wait()

    assert [stream.device_index for stream in rank.cuda.private] == [0, 1]
    assert before_the_wait == script  # nothing but the script's own wait holds its stream
    assert rank.cuda.recorded_on == rank.cuda.private
    assert not rank.failures


def test_a_call_behind_one_that_runs_over_from_the_last_step_is_not_exact(
    rank: DeviceRank,
) -> None:
    rank.recorder.is_sampled = False
    first = rank.begin(50)
    rank.end_step()
    rank.recorder.is_sampled = True
    calls = [rank.begin(10), rank.begin(10)]
    rank.compute.run(40)
    first.wait()
    for work in calls:
        work.wait()

    rank.steps()

    assert [call.is_bound for call in rank.batches[1].calls] == [True, False]
    assert rank.batches[1].calls[1].duration_ns == pytest.approx(10e6)


def test_the_first_call_of_a_sampled_step_is_exact_if_training_has_waited_for_all_before(
    rank: DeviceRank,
) -> None:
    for step in range(4):
        rank.recorder.is_sampled = step == 3
        rank.begin(10).wait()
        rank.end_step()

    rank.steps()

    bounds = [call.is_bound for batch in rank.batches for call in batch.calls]
    assert bounds == [True, True, True, False]


def test_replayed_messages_lower_the_coverage_once(rank: DeviceRank, groups: Groups) -> None:
    messages = groups.find(dist.group.WORLD, point_to_point=True)
    messages.replayed = 3
    issue_on_group()
    groups.find(dist.group.WORLD).recorded = 1

    coverage = groups.drain_coverage()
    issue_on_group()
    groups.find(dist.group.WORLD).recorded = 1

    assert coverage == pytest.approx(1 / 4)
    assert groups.drain_coverage() == 1.0


@pytest.fixture
def uncounted(rank: DeviceRank, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """The record of a world group whose backend does not count its calls."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    made = Groups()
    known = made.find(dist.group.WORLD)
    assert known is not None
    monkeypatch.setattr(rank.recorder, "groups", made)
    yield known
    dist.destroy_process_group()


def test_a_failed_call_of_a_backend_that_does_not_count_is_reported(
    rank: DeviceRank, uncounted: Group
) -> None:
    failed: list[CollectiveCall] = []
    rank.recorder.connect(None, None, failed.append)
    for _ in range(3):
        (call,) = rank.recorder.on_call(reader_of("all_reduce"), (torch.ones(8),), {}) or []

    rank.recorder.on_error(call, RuntimeError("connection closed"))

    assert failed == [call]
    assert (call.sequence, uncounted.rank_set.issued, uncounted.recorded) == (3, 3, 3)


@pytest.mark.usefixtures("uncounted")
def test_a_refused_call_without_a_number_does_not_change_the_numbers(
    rank: DeviceRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Group, "num_issued", lambda _: 0)
    (call,) = rank.recorder.on_call(reader_of("send"), (torch.ones(8), 1), {}) or []
    call.group.recorded = 1

    rank.recorder.on_error(call, ValueError("wrong arguments"))

    assert (call.sequence, call.group.rank_set.issued) == (0, 0)


def test_a_backend_that_does_not_count_is_asked_once(
    rank: DeviceRank, uncounted: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> int:
        raise AssertionError

    monkeypatch.setattr(uncounted, "sequence_number", refuse)
    reader, arguments = reader_of("reduce_scatter"), (torch.ones(1), [torch.ones(1)] * 8)

    calls = rank.recorder.on_call(reader, arguments, {})
    assert calls is not None
    rank.recorder.on_return(reader, calls, None, 1, 2)

    assert (reader.use_group_sequence, uncounted.recorded) == (True, 0)
    assert rank.recorder.groups.drain_coverage() is None
