"""Tests of the time for which collectives block the compute stream, on a fake device.

Covers `call_recorder.py`.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from fakes.device_rank import DeviceRank
from fakes.sleeping_collectives import MS, FourRankGroup
from fakes.waits_for_calls import (
    CASES,
    a_side_stream_that_is_joined,
    never_waited_for,
    waited_for_halfway,
)

from zerowatch.metrics.catalog.labels import PHASES
from zerowatch.runtime.collectives.stream_waits import MAX_EVENTS
from zerowatch.runtime.common.phase_timer import BACKWARD, OPTIMIZER


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceRank]:
    made = DeviceRank(monkeypatch)
    yield made
    made.instrumentation.close()


@pytest.mark.parametrize(("what", "exposed_ms", "comm_ms"), CASES)
def test_exposed_is_what_blocked_the_compute_stream(
    rank: DeviceRank, what: Callable[[DeviceRank], None], exposed_ms: float, comm_ms: float
) -> None:
    what(rank)

    (step,) = rank.steps()
    assert step.exposed_seconds == pytest.approx(exposed_ms / 1000, abs=1e-8)
    assert step.seconds == pytest.approx(comm_ms / 1000, abs=1e-8)


@pytest.mark.parametrize(("what", "exposed_ms", "comm_ms"), CASES)
def test_exposed_is_exact_and_comm_a_bound_in_a_step_that_is_not_sampled(
    rank: DeviceRank, what: Callable[[DeviceRank], None], exposed_ms: float, comm_ms: float
) -> None:
    rank.recorder.is_sampled = False

    what(rank)

    (step,) = rank.steps()
    assert step.exposed_seconds == pytest.approx(exposed_ms / 1000, abs=1e-8)
    if what is never_waited_for:
        assert step.comm_seconds is None
    else:
        assert step.comm_seconds is not None
        assert step.comm_seconds >= comm_ms / 1000 - 1e-8
    assert rank.cuda.recorded_on == []


@pytest.mark.parametrize(("computed_ms", "exposed_ms"), [(2, 10), (11, 1)])
def test_each_instant_of_one_wait_for_two_groups_belongs_to_one(
    rank: DeviceRank, computed_ms: int, exposed_ms: int
) -> None:
    other = FourRankGroup("world", "nccl")
    with rank.on_side():
        first = rank.begin(10)
        rank.begin(12, group=other).wait()
        first.wait()
    rank.compute.run(computed_ms)
    rank.compute.wait_stream(rank.side)

    (step,) = rank.steps()

    assert step.exposed_seconds == pytest.approx(exposed_ms / 1000, abs=1e-8)


def test_a_wait_in_the_next_step_belongs_to_the_step_of_the_call(rank: DeviceRank) -> None:
    work = rank.begin(10)
    rank.end_step()
    rank.compute.run(4)
    work.wait()
    rank.compute.run(1)

    first, second = rank.steps()

    assert first.exposed_seconds == pytest.approx(0.006)
    assert second.exposed_seconds == 0.0


def test_a_wait_that_the_device_has_not_reached_is_not_waited_for(rank: DeviceRank) -> None:
    work = rank.begin(10)
    rank.end_step()
    rank.compute.run(3000)
    work.wait()

    first, _ = rank.steps()

    assert first.exposed_seconds == 0.0
    assert first.seconds == pytest.approx(0.010)


def test_a_wait_for_what_has_settled_marks_nothing(rank: DeviceRank) -> None:
    work = rank.begin(10)
    rank.steps()
    before = rank.cuda.num_records

    work.wait()

    assert rank.cuda.num_records == before


def test_the_phase_of_the_wait_is_blocked_and_not_that_of_the_call(rank: DeviceRank) -> None:
    rank.phases.enter(BACKWARD)
    with rank.on_side():
        rank.reduce(10)
    rank.phases.leave()
    rank.phases.enter(OPTIMIZER)
    rank.compute.wait_stream(rank.side)
    rank.phases.leave()

    (step,) = rank.steps()

    blocked = {PHASES[i]: ns / MS for i, ns in enumerate(step.blocked_ns) if ns}
    assert blocked == {"optimizer": pytest.approx(10)}


def test_nothing_is_recorded_while_a_graph_is_captured_and_it_is_counted(rank: DeviceRank) -> None:
    with rank.on_side():
        rank.reduce(10)
    before = rank.cuda.num_events
    rank.cuda.capturing = True  # from here on the device refuses events
    rank.side.synchronize()
    after = rank.cuda.num_events
    rank.cuda.capturing = False

    (step,) = rank.steps()

    assert after == before
    assert rank.instrumentation.call_recorder.dropped_in_capture == 1
    assert step.exposed_seconds == 0.0


def test_calls_that_become_part_of_a_graph_get_no_number(rank: DeviceRank) -> None:
    rank.reduce(10)
    graph = rank.cuda.Graph()
    graph.capture_begin()  # another rank may capture less often
    rank.reduce(10)
    rank.begin(10)
    graph.capture_end()
    rank.reduce(10)
    rank_set = rank.recorder.groups.find(None).rank_set

    assert [call.sequence for call in rank_set.recent] == [1, 0, 0, 2]
    assert rank_set.issued == 2
    assert rank.recorder.dropped_in_capture == 2
    assert not rank.failures


def test_a_call_whose_start_cannot_be_marked_keeps_its_number(
    rank: DeviceRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA error: invalid resource handle")

    monkeypatch.setattr(rank.recorder.events, "record", refuse)
    rank.reduce(10)
    rank_set = rank.recorder.groups.find(None).rank_set

    assert [(call.sequence, call.settled) for call in rank_set.recent] == [(1, True)]


def test_a_replay_on_the_training_thread_is_activity(rank: DeviceRank) -> None:
    graph = rank.cuda.Graph()
    graph.capture_begin()
    graph.capture_end()
    rank.host.elapse(5000)
    idle_before = rank.phases.idle_seconds()
    graph.replay()
    idle_after = rank.phases.idle_seconds()

    rank.host.elapse(5000)
    other = threading.Thread(target=graph.replay)  # a graph of an evaluation, for example
    other.start()
    other.join()

    assert (idle_before, idle_after, rank.phases.idle_seconds()) == (5.0, 0.0, 5.0)


def test_the_captured_graphs_that_still_exist_are_known(rank: DeviceRank) -> None:
    graphs = [rank.cuda.Graph() for _ in range(2)]
    for graph in graphs:
        graph.capture_begin()
        graph.capture_end()
    num_before = len(rank.cuda.captured_graphs)

    del graph, graphs[1]
    gc.collect()

    assert num_before == 2
    assert list(rank.cuda.captured_graphs.values()) == graphs


def test_a_graph_that_is_reset_has_captured_nothing_until_it_captures_again(
    rank: DeviceRank,
) -> None:
    graph, found = rank.cuda.Graph(), []
    for use in (graph.capture_begin, graph.capture_end, graph.reset) * 2:
        use()
        found.append(len(rank.cuda.captured_graphs))

    assert found == [0, 1, 0, 0, 1, 0]


class AnyGraph:
    """`torch.accelerator.Graph`, which calls the graph of the accelerator in C++."""

    def capture_begin(self) -> None:
        """Do nothing."""

    capture_end = replay = reset = capture_begin


def test_graphs_of_torch_s_class_for_any_accelerator_are_seen_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = dict(vars(AnyGraph))
    monkeypatch.setattr(torch.accelerator, "Graph", AnyGraph, raising=False)
    rank, graph = DeviceRank(monkeypatch), AnyGraph()

    graph.capture_begin()
    graph.capture_end()
    num_captured = len(rank.cuda.captured_graphs)
    rank.host.elapse(5000)
    graph.replay()
    idle_seconds = rank.phases.idle_seconds()
    graph.reset()
    rank.instrumentation.close()

    assert (num_captured, idle_seconds, len(rank.cuda.captured_graphs)) == (1, 0.0, 0)
    assert dict(vars(AnyGraph)) == before


def test_events_are_used_again_once_read(rank: DeviceRank) -> None:
    waited_for_halfway(rank)
    a_side_stream_that_is_joined(rank)
    rank.steps()
    needed = rank.cuda.num_events
    rank.batches.clear()

    for _ in range(3):
        waited_for_halfway(rank)
        rank.steps()
        rank.batches.clear()

    assert rank.cuda.num_events == needed


def test_a_handle_that_is_dropped_is_forgotten(rank: DeviceRank) -> None:
    rank.begin(10)

    assert rank.instrumentation.call_recorder._works == {}


def test_events_of_the_script_have_no_weak_references(rank: DeviceRank) -> None:
    """Those to events of CUDA outlive their event in torch 2.10 to 2.12, which is a crash."""
    with rank.on_side():
        rank.reduce(10)
    event = rank.side.record_event()

    assert event in rank.recorder.stream_waits._recorded
    assert weakref.getweakrefs(event) == []


def test_of_many_events_of_the_script_the_last_are_kept_and_none_after_the_end(
    rank: DeviceRank,
) -> None:
    with rank.on_side():
        rank.reduce(10)
    events = [rank.side.record_event() for _ in range(MAX_EVENTS + 3)]
    kept = rank.recorder.stream_waits._recorded

    assert list(kept) == events[3:]
    events[3].record(rank.side)  # recorded again: now the last
    assert list(kept) == [*events[4:], events[3]]
    rank.instrumentation.close()
    assert not kept


def test_calls_that_the_compute_stream_has_waited_for_by_events_are_forgotten(
    rank: DeviceRank,
) -> None:
    waits = rank.recorder.stream_waits
    num_kept = []
    for _ in range(600):
        with rank.on_side():
            rank.reduce(1)
        event = rank.side.record_event()
        rank.compute.run(0.4)
        rank.compute.wait_event(event)
        num_kept.append(sum(map(len, [*waits._carried.values(), *waits._recorded.values()])))

    (step,) = rank.steps()

    assert max(num_kept) <= 2
    assert step.exposed_seconds == pytest.approx(600 * 0.0006)
    assert step.seconds == pytest.approx(600 * 0.001)


def test_a_call_behind_one_that_was_waited_for_is_still_carried(rank: DeviceRank) -> None:
    with rank.on_side():
        rank.reduce(10)
        first = rank.side.record_event()
        rank.reduce(20)
    both = rank.side.record_event()
    rank.compute.wait_event(first)
    rank.compute.run(5)
    rank.compute.wait_event(both)

    (step,) = rank.steps()

    assert step.exposed_seconds == pytest.approx(0.010 + 0.015)


def test_an_event_that_another_stream_waits_for_first_still_carries_its_call(
    rank: DeviceRank,
) -> None:
    between = rank.cuda.new_stream()
    with rank.on_side():
        rank.reduce(10)
    event = rank.side.record_event()
    between.wait_event(event)
    rank.compute.run(4)
    rank.compute.wait_event(between.record_event())
    rank.compute.wait_event(event)  # nothing is left to wait for

    (step,) = rank.steps()

    assert step.exposed_seconds == pytest.approx(0.006)


def test_closing_restores_the_original_functions(rank: DeviceRank) -> None:
    during = rank.standing()
    kept = rank.cuda.Stream.synchronize

    with rank.on_side():
        rank.reduce(10)
    rank.instrumentation.close()
    records = rank.cuda.num_records
    kept(rank.side)  # a wrapper that the script kept is a pass-through

    assert rank.standing() == rank.before
    assert not [name for name, old in zip(during, rank.before, strict=True) if name is old]
    assert rank.cuda.num_records == records
    assert rank.side.busy_until <= rank.host.now_ns


def test_a_build_without_cuda_keeps_its_names(
    rank: DeviceRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.instrumentation.close()
    monkeypatch.setattr(rank.cuda, "is_built", lambda: False)

    rank.instrumentation.open()

    assert rank.standing() == rank.before
