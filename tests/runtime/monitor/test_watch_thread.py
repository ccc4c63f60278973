"""Tests of the watch thread while the device raises errors: steps are written, without times."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.clock import FakeClock, set_clock
from fakes.cuda_streams import FakeCuda
from fakes.scraper import eventually
from fakes.sleeping_collectives import ManualClock

from zerowatch.metrics.catalog.labels import PHASES
from zerowatch.metrics.step_record import StepRecord
from zerowatch.runtime.collectives.call_batch import CallBatch
from zerowatch.runtime.collectives.call_recorder import CallRecorder
from zerowatch.runtime.collectives.groups import CollectiveCall
from zerowatch.runtime.collectives.unseen_calls import FlightRecorder, UnseenCalls
from zerowatch.runtime.common import device_scalar
from zerowatch.runtime.common.device_scalar import PendingScalar
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.phase_timer import PhaseTimer
from zerowatch.runtime.instrumentation.device_phases import DevicePhases, DevicePhaseTimes
from zerowatch.runtime.instrumentation.generated_tokens import GenerationCounts
from zerowatch.runtime.instrumentation.raw_step import RawStep, StepCounts
from zerowatch.runtime.memory.step_sample import StepMemorySample
from zerowatch.runtime.monitor import watch_thread
from zerowatch.runtime.monitor.step_analysis import StepAnalysis
from zerowatch.runtime.monitor.subscriptions import for_each
from zerowatch.runtime.monitor.watch_thread import (
    MAX_PENDING,
    MAX_WAITING,
    STEPS_PER_WRITE,
    WAKING_ITEMS,
    WatchThread,
)


class FakeGroup:
    role = "dp"
    size = 2
    busy_until_ns = maybe_busy_until_ns = 0

    def wire_factor(self, op: int, payload_bytes: int) -> float:
        return 1.0


class Rank:
    """A watch thread with a recorder of calls on a fake device, and the steps it has written."""

    def __init__(self, device: FakeCuda, ring: Any = None, *, is_logged: bool = True) -> None:
        self.device, self.fail_open = device, FailOpen()
        self.recorder, self.group = CallRecorder(), FakeGroup()
        self.written: list[StepRecord] = []
        self.closed: list[str] = []
        self.compared: list[Any] = []  # step times
        self.writes: list[int] = []  # numbers of records
        self.risks: dict[str, float] = {}
        self.folder: Any = SimpleNamespace(append=self.write, ring=ring, is_logged=is_logged)
        sampler: Any = SimpleNamespace(
            device_readings={},
            read_devices=lambda: None,
            close=lambda: self.closed.append("devices"),
        )
        comparison: Any = SimpleNamespace(add_step_times=lambda *times: self.compared.append(times))
        self.analysis = StepAnalysis(
            step_metrics=SimpleNamespace(publish=lambda steps, totals: None),  # type: ignore[arg-type]
            sampler=sampler,
            memory=SimpleNamespace(add_step=lambda step: self.risks),  # type: ignore[arg-type]
            comparison=comparison,
            folder=self.folder,
            otel=SimpleNamespace(makes_traces=False),  # type: ignore[arg-type]
            fail_open=self.fail_open,
            listeners=[],
            on_device=False,
        )
        self.thread = WatchThread(
            analysis=self.analysis,
            sampler=sampler,
            folder=self.folder,
            calls=self.recorder,
            fail_open=self.fail_open,
            device_phases=None,
            device_index=0,
        )

    def call(self, milliseconds: float = 1.0, *, blocks: bool = False) -> Any:
        """Issue a collective of the device."""
        call: Any = CollectiveCall(0, self.group, 8, torch.float32, 0)  # type: ignore[arg-type]
        call.start_ns, call.issued_ns = 1, 1 + blocks
        call.start_event = self.recorder.events.record()
        self.device.current.run(milliseconds)
        call.end_event = self.recorder.events.record()
        call.end_ns = 2
        self.recorder._add([call])
        return call

    def host_call(self) -> None:
        """Issue a collective of the host, which has ended."""
        call: Any = CollectiveCall(0, self.group, 8, torch.float32, 0)  # type: ignore[arg-type]
        call.start_ns, call.issued_ns, call.end_ns = 1, 1, 5_000_001
        self.recorder._add([call])

    def end_step(
        self,
        number: int,
        loss: Any = 0.5,
        seconds: float = 1e-6,
        generation: GenerationCounts | None = None,
        memory: Any = None,
        unseen: UnseenCalls | None = None,
    ) -> None:
        """Enqueue a step with the calls since the last one."""
        step = RawStep(
            step=number,
            ended_at=float(number),
            phase_ns=[round(seconds * 1e9), *([0] * (len(PHASES) - 1))],
            intervals=(),
            counts=StepCounts(micro_batches=1, losses=[loss], generation=generation),
            coverage=None,
            gradient_norm=1.0,
            learning_rate=0.1,
            loss_scale=None,
            trace=None,
            memory=memory,
            batch=self.recorder.drain(),
            unseen=unseen,
        )
        self.thread.enqueue(step)

    def write(self, records: Sequence[StepRecord]) -> None:
        self.written.extend(records)
        self.writes.append(len(records))

    def poll(self) -> None:
        """Let the thread look once."""
        self.thread._take_queue()
        self.thread._finish_pending()
        self.analysis.write_log()

    def is_woken(self) -> bool:
        """Whether something has woken the thread since the last call."""
        was_woken = not self.thread._bell.empty()
        while not self.thread._bell.empty():
            self.thread._bell.get_nowait()
        return was_woken

    def finish(self) -> list[int]:
        """Stop the thread; return the numbers of the steps in the run log."""
        self.thread.start({})
        self.thread.stop(timeout_seconds=120.0)
        return [record.step for record in self.written]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    device = FakeCuda(ManualClock())
    device.patch(monkeypatch)
    monkeypatch.setattr(device_scalar, "_slots", {})
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options)
    )
    return Rank(device)


def test_calls_of_a_device_are_timed(rank: Rank) -> None:
    rank.call(milliseconds=20)
    rank.end_step(1)
    rank.device.synchronize()

    assert rank.finish() == [1]
    assert rank.written[0].comm_seconds == pytest.approx(0.020)
    assert not rank.fail_open.failures


def test_the_thread_is_prepared_for_the_device_before_it_asks_for_events(rank: Rank) -> None:
    rank.thread._device_index = 3
    rank.call(milliseconds=20)
    rank.end_step(1, loss=PendingScalar(torch.tensor(0.25)))
    rank.device.synchronize()

    assert rank.finish() == [1]
    assert rank.written[0].loss == 0.25
    assert rank.device.prepared == {"zerowatch-watch": 3}


def test_a_thread_that_cannot_be_prepared_asks_for_no_events_and_loses_only_what_needs_them(
    rank: Rank,
) -> None:
    rank.device.can_prepare = False
    phases = rank.thread._device_phases = DevicePhases(rank.recorder.events)
    phases.mark(0)
    rank.thread._read_phases = phases.read
    rank.call(milliseconds=20)
    rank.end_step(1, loss=PendingScalar(torch.tensor(0.25)))
    rank.host_call()
    rank.end_step(2, generation=tokens_of(PendingScalar(torch.tensor(7))))
    rank.device.synchronize()

    assert rank.finish() == [1, 2]
    assert "zerowatch-watch" not in rank.device.queried_by
    assert [record.loss for record in rank.written] == [None, 0.5]
    assert [record.comm_seconds for record in rank.written] == [None, pytest.approx(0.005)]
    assert rank.written[1].generation is not None
    assert rank.written[1].generation.tokens is None
    assert rank.thread.untimed_calls == 1
    assert rank.recorder.events.disabled
    assert phases.end_step().is_read
    assert not rank.fail_open.failures


def test_what_is_marked_while_a_thread_gives_up_is_not_asked_for(rank: Rank) -> None:
    phases = DevicePhases(rank.recorder.events)

    class GivesUp:
        disabled = False

        def record(self, stream: object) -> Any:
            phases.give_up()  # by the watch thread, after the training thread has looked
            return rank.device.Event()

    phases._events = GivesUp()  # type: ignore[assignment]
    phases.mark(0)
    late = DevicePhaseTimes()
    phases._marks.append(late)
    phases.read()

    assert late.is_read
    assert rank.device.queried_by == set()


def test_a_thread_whose_device_raises_writes_all_steps(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(index: int) -> bool:
        raise ValueError(f"no device {index}")

    monkeypatch.setattr(rank.device, "prepare_thread", prepare)
    rank.call(milliseconds=20)
    rank.end_step(1)

    assert rank.finish() == [1]
    assert rank.device.queried_by == set()
    assert rank.fail_open.failures == {"device of the watch thread": 1}


def tokens_of(number: PendingScalar) -> GenerationCounts:
    generation = GenerationCounts()
    generation.add(1, number)
    return generation


def test_after_a_device_side_assert_all_steps_are_written_without_what_the_device_has_not_returned(
    rank: Rank,
) -> None:
    for number in (1, 2, 3):
        rank.call(milliseconds=20)
        rank.end_step(number, loss=PendingScalar(torch.tensor(0.25)))
    rank.device.is_broken = True
    rank.end_step(4)

    assert rank.finish() == [1, 2, 3, 4]
    assert [record.loss for record in rank.written] == [None, None, None, 0.5]
    assert all(record.gradient_norm == 1.0 for record in rank.written)
    assert rank.thread.untimed_calls == 3
    assert rank.closed == ["devices"]
    assert rank.fail_open.failures == {"step measurements": 3}
    assert rank.recorder.events.disabled


@pytest.mark.parametrize(("is_broken", "tokens"), [(False, 12), (True, None)])
def test_a_step_waits_for_its_generated_tokens_unless_the_device_has_failed(
    rank: Rank, is_broken: bool, tokens: int | None
) -> None:
    rank.device.current.run(20)
    generation = GenerationCounts()
    generation.add(2, 5.0)
    generation.add(2, PendingScalar(torch.tensor(7)))
    rank.end_step(1, generation=generation)
    rank.poll()
    before = list(rank.written)
    rank.device.synchronize()
    rank.device.is_broken = is_broken

    assert (before, rank.finish()) == ([], [1])
    found = rank.written[0].generation
    assert found is not None
    assert (found.calls, found.sequences, found.tokens) == (2, 4, tokens)


def test_a_device_that_fails_while_a_step_is_given_up_loses_no_step(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.call(milliseconds=20)
    loss = PendingScalar(torch.tensor(0.25))
    rank.end_step(1, loss=loss)
    (slot,) = loss._slot
    not_yet = slot.done.query

    def fail_afterwards() -> bool:
        rank.device.is_broken = not not_yet()
        return False

    monkeypatch.setattr(slot.done, "query", fail_afterwards)

    assert rank.finish() == [1]
    assert rank.written[0].loss is None
    assert rank.thread.untimed_calls == 1


def test_calls_that_are_drained_after_a_device_side_assert_are_counted(rank: Rank, caplog) -> None:
    rank.call()
    rank.device.is_broken = True

    batch = rank.recorder.drain()
    rank.recorder.drain()

    assert [call.settled for call in batch.calls] == [True]
    assert batch.settled()
    assert [entry.levelname for entry in caplog.records] == ["WARNING"]


def test_one_batch_that_cannot_be_read_loses_its_times_and_no_other_batch_does(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[CallBatch] = []
    for number in (1, 2, 3):
        rank.call(milliseconds=20)
        batches.append(rank.recorder.drain())
        rank.thread.enqueue(batches[-1])
        rank.end_step(number)
    rank.device.synchronize()

    def other_device(end: object) -> float:
        raise RuntimeError("Event device 0 does not match recording stream's device 1.")

    start = batches[1].calls[0].start_event
    monkeypatch.setattr(start, "elapsed_time", other_device)

    assert rank.finish() == [1, 2, 3]
    seconds = [record.comm_seconds for record in rank.written]
    assert seconds == [pytest.approx(0.020), None, pytest.approx(0.020)]
    assert rank.written[1].comm_exposed_seconds is None
    assert rank.written[1].collectives["all_reduce"].calls == 1
    assert rank.thread.untimed_calls == 1
    assert rank.fail_open.failures == {"collective times": 1}
    assert not rank.recorder.events.disabled


def test_a_step_is_given_up_after_a_minute_or_three_steps_and_its_communication_is_unknown(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(
        "zerowatch.runtime.monitor.watch_thread.time", SimpleNamespace(monotonic=clock)
    )
    rank.end_step(1, seconds=30.0)
    rank.call(milliseconds=10_000)  # the device does not get that far
    rank.end_step(2)

    written = []
    for seconds in (0.0, 89.0, 2.0):
        clock.seconds += seconds
        rank.poll()
        written.append([record.step for record in rank.written])

    assert written == [[1], [1], [1, 2]]
    assert rank.written[1].comm_seconds is None
    assert rank.written[1].comm_exposed_seconds is None
    assert len(rank.compared) == 1  # what blocked the other step is not known
    assert rank.thread.untimed_calls == 1


@pytest.mark.parametrize("arrives", [True, False])
def test_steps_that_the_device_still_runs_at_the_end_are_waited_for_a_little(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    clock = FakeClock()
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        clock.seconds += seconds
        sleeps.append(seconds)
        if arrives and sum(sleeps) > 0.3:
            rank.device.synchronize()

    set_clock(monkeypatch, watch_thread, monotonic=clock, sleep=sleep)
    for number in (1, 2, 3):
        rank.call(milliseconds=20)
        rank.end_step(number, loss=PendingScalar(torch.tensor(0.25)))
    rank.thread.start({})
    rank.thread.stop(timeout_seconds=120.0, waits_for_device=True)

    has_arrived = (0.3 < sum(sleeps) < 1.0) if arrives else sum(sleeps) == pytest.approx(2.0)
    assert has_arrived, sleeps
    assert [record.step for record in rank.written] == [1, 2, 3]
    assert [record.loss for record in rank.written] == [0.25 if arrives else None] * 3
    assert rank.thread.untimed_calls == (0 if arrives else 3)
    assert rank.thread.is_complete


@pytest.mark.parametrize("is_broken", [True, False])
def test_the_end_does_not_wait_after_a_failure_of_the_run_or_of_the_device(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError("it waits")

    set_clock(monkeypatch, watch_thread, sleep=sleep)
    rank.call(milliseconds=20)
    rank.end_step(1, loss=PendingScalar(torch.tensor(0.25)))
    rank.device.is_broken = is_broken
    rank.thread.start({})
    rank.thread.stop(timeout_seconds=120.0, waits_for_device=is_broken)

    assert [record.loss for record in rank.written] == [None]
    assert "watch thread" not in rank.fail_open.failures


def test_items_beyond_the_queue_are_dropped_and_counted_with_their_calls(rank: Rank) -> None:
    for _ in range(1023):
        rank.thread.enqueue(CallBatch([]))
    rank.end_step(1)
    rank.call()
    rank.call()
    rank.end_step(2)
    rank.call()
    rank.thread.enqueue(rank.recorder.drain())

    assert (rank.thread.dropped_steps, rank.thread.dropped_calls) == (1, 3)
    assert rank.finish() == [1]


def test_calls_of_a_step_that_never_ended_do_not_count_as_exposed(rank: Rank) -> None:
    calls = [rank.call(milliseconds=20, blocks=True) for _ in range(2)]
    rank.end_step(1)
    calls.append(rank.call(milliseconds=20, blocks=True))
    rank.thread.enqueue_rest(rank.recorder.drain())
    rank.device.synchronize()
    rank.finish()

    assert [call.exposed_ns > 0 for call in calls] == [True, True, False]
    assert all(call.duration_ns > 0 for call in calls)


def test_calls_after_the_last_step_do_not_count_as_exposed_however_long_the_script_goes_on(
    rank: Rank,
) -> None:
    rank.recorder.connect(PhaseTimer(), rank.thread.enqueue)
    rank.end_step(1)
    waited = rank.call(milliseconds=20_000, blocks=True)
    rank.device.synchronize()
    rank.recorder.pass_on_between_steps()
    rank.poll()
    rank.thread.enqueue_rest(rank.recorder.drain())
    rank.finish()

    assert waited.duration_ns == pytest.approx(20e9)
    assert waited.exposed_ns == 0


def test_without_any_step_all_calls_count(rank: Rank) -> None:
    call = rank.call(milliseconds=20, blocks=True)
    rank.thread.enqueue_rest(rank.recorder.drain())
    rank.device.synchronize()
    rank.finish()

    assert call.exposed_ns > 0


def test_steps_in_which_a_group_counted_unseen_calls_have_no_exposed_time(rank: Rank) -> None:
    rank.end_step(1)
    item = rank.thread._inbox.popleft()
    item.unseen = SimpleNamespace(missing={})
    rank.thread.enqueue(item)
    rank.end_step(2)
    rank.poll()

    assert [record.comm_exposed_seconds for record in rank.written] == [None, 0.0]
    assert len(rank.compared) == 1


def test_no_step_is_lost_while_the_flight_recorder_is_not_read(rank: Rank) -> None:
    clock, entries = FakeClock(), list[dict[str, Any]]()
    last = 2 * MAX_PENDING

    def dump() -> dict[str, Any]:
        clock.seconds += 1.0  # so the next read is due 200 s later
        return {"entries": list(entries)}

    rank.thread._flight_recorder = FlightRecorder(dump, now=clock, cpu_now=clock)
    group: Any = rank.group
    for number in range(1, last + 1):
        calls = UnseenCalls({group: 1}, {group: "0"}, [(group, 0, number, number)], clock.seconds)
        entries.append(all_reduce_entry(number))
        rank.end_step(number, unseen=calls)
        if len(rank.thread._inbox) > WAKING_ITEMS:
            rank.poll()
    rank.poll()

    assert rank.thread.dropped_steps == 0
    assert len(rank.written) == last - MAX_WAITING
    assert rank.finish() == list(range(1, last + 1))
    have_calls = [record.step for record in rank.written if record.collectives]
    first_read = range(1, WAKING_ITEMS + 2)
    assert have_calls == [*first_read, *range(last - MAX_WAITING + 1, last + 1)]


def all_reduce_entry(number: int) -> dict[str, Any]:
    """A call of eight bytes in the Flight Recorder."""
    return {
        "collective_seq_id": number,
        "process_group": ("0", "default_pg"),
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[2]],
        "input_dtypes": ["Float"],
    }


def test_the_phases_of_a_step_and_what_blocked_them_are_compared(rank: Rank) -> None:
    rank.end_step(1, seconds=3.0)
    rank.poll()

    [(phase_ns, blocked_ns)] = rank.compared
    assert phase_ns == [3_000_000_000, *([0] * (len(PHASES) - 1))]
    assert blocked_ns == [0] * len(PHASES)


def test_listeners_get_each_step_after_it_was_published_and_tasks_run_after_them(
    rank: Rank,
) -> None:
    order: list[object] = []
    thread: Any = rank.thread
    analysis: Any = rank.analysis
    analysis._publish = lambda steps, totals: order.append([step.record.step for step in steps])
    analysis._listeners = [
        lambda records: order.append(("first", [record.step for record in records])),
        for_each(lambda record: order.append(("second", record.step))),
    ]
    thread._tasks = [lambda: order.append("task")]
    rank.end_step(1)
    rank.end_step(2)

    assert rank.finish() == [1, 2]
    of_one_second = [[1, 2], ("first", [1, 2]), ("second", 1), ("second", 2), "task"]
    assert order == [*of_one_second, [], "task"]  # at its end is a second without steps


class FakeRing:
    """A ring that keeps the numbers of the steps written to it."""

    def __init__(self, *, is_recoverable: bool = True, is_broken: bool = False) -> None:
        self.is_recoverable, self.is_broken = is_recoverable, is_broken
        self.steps: list[int] = []

    def write(self, step: RawStep) -> bool:
        if self.is_broken:
            raise ValueError("mmap closed or invalid")
        self.steps.append(step.step)
        return self.is_recoverable


def device_of(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    device = FakeCuda(ManualClock())
    device.patch(monkeypatch)
    return device


def test_a_step_that_survives_a_kill_does_not_wake_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring = FakeRing()
    rank = Rank(device_of(monkeypatch), ring)
    rank.end_step(1)

    assert not rank.is_woken()
    assert ring.steps == [1]
    assert rank.finish() == [1]


@pytest.mark.parametrize(
    ("states", "is_needed_soon"),
    [
        ({"allocated": 1.0, "peak_allocated": 4.9, "limit": 10.0}, False),
        ({"allocated": 1.0, "peak_allocated": 5.0, "limit": 10.0}, True),
        ({"allocated": 9.0, "limit": 10.0}, True),
        ({"allocated": 9.0}, False),  # the report has no ratio of it either
    ],
)
def test_only_a_memory_sample_that_may_explain_a_kill_wakes_the_thread(
    monkeypatch: pytest.MonkeyPatch, states: dict[str, float], is_needed_soon: bool
) -> None:
    rank = Rank(device_of(monkeypatch), FakeRing())
    rank.end_step(1, memory=StepMemorySample(readings={"cpu": states}, shapes=()))

    assert rank.is_woken() is is_needed_soon  # the ring has no memory samples
    assert rank.finish() == [1]


def test_each_memory_sample_wakes_the_thread_while_memory_is_likely_to_run_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(device_of(monkeypatch), FakeRing())
    far = StepMemorySample(readings={"cpu": {"allocated": 1.0, "limit": 10.0}}, shapes=())
    rank.risks = {"cpu": 0.8}
    rank.end_step(1, memory=far)
    assert not rank.is_woken()
    rank.poll()

    rank.end_step(2, memory=far)

    assert rank.is_woken()
    assert rank.finish() == [1, 2]


def test_the_steps_of_a_second_are_written_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(device_of(monkeypatch), FakeRing())
    for number in range(1, 100):
        rank.end_step(number)

    rank.poll()

    assert rank.writes == [STEPS_PER_WRITE, 99 - STEPS_PER_WRITE]
    assert rank.finish() == list(range(1, 100))


@pytest.mark.parametrize(
    "ring",
    [None, FakeRing(is_recoverable=False), FakeRing(is_broken=True)],
    ids=["no room", "run id not known yet", "broken"],
)
def test_each_step_wakes_the_thread_if_a_kill_would_lose_it(
    monkeypatch: pytest.MonkeyPatch, ring: Any
) -> None:
    rank = Rank(device_of(monkeypatch), ring)
    for number in (1, 2):
        rank.end_step(number)
        assert rank.is_woken()

    assert rank.finish() == [1, 2]


def test_no_step_wakes_the_thread_if_no_run_log_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(device_of(monkeypatch), is_logged=False)

    rank.end_step(1)

    assert not rank.is_woken()
    assert rank.finish() == [1]


def test_the_thread_hurries_only_for_what_has_woken_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(device_of(monkeypatch))  # without a ring: each step wakes it
    rank.call(20)
    rank.end_step(1)
    rank.thread._wait()
    rank.poll()
    waits_for_first = rank.thread._num_hurried
    rank.thread._write_ring = FakeRing().write
    rank.call(20)
    rank.end_step(2)
    rank.device.host.elapse(30)

    rank.poll()

    assert (waits_for_first, rank.thread._num_hurried) == (1, 0)
    assert [record.step for record in rank.written] == [1]
    rank.device.host.elapse(30)
    assert rank.finish() == [1, 2]


def test_a_report_waits_until_the_thread_has_taken_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(device_of(monkeypatch), FakeRing())
    rank.thread.catch_up(60.0)  # returns at once: the thread does not run yet
    rank.thread.start({})
    rank.end_step(1)

    rank.thread.catch_up(60.0)

    assert [record.step for record in rank.written] == [1]
    rank.thread.stop(timeout_seconds=120.0)


def test_steps_that_a_dead_thread_has_left_are_counted_and_remain_in_the_ring(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(device_of(monkeypatch), FakeRing())
    monkeypatch.setattr(rank.thread, "_finish", lambda *, final: None)  # a hook that was dropped
    rank.thread.start({})
    for number in (1, 2, 3):
        rank.end_step(number)

    rank.thread.stop(timeout_seconds=120.0)

    assert (rank.thread.dropped_steps, rank.thread.is_complete) == (3, False)
    assert "3 step(s) are neither in the run log nor in the metrics" in caplog.text


def test_a_run_log_that_has_failed_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(device_of(monkeypatch), FakeRing())
    rank.folder.append = lambda records: 1 / 0
    rank.end_step(1)

    rank.finish()

    assert not rank.thread.is_complete
    assert rank.fail_open.failures == {"run log": 1}


def test_many_short_steps_wake_the_thread_long_before_the_ring_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(device_of(monkeypatch), FakeRing())
    woken = []
    for number in range(1, WAKING_ITEMS + 3):
        rank.end_step(number)
        woken.append(rank.is_woken())

    assert woken == [False] * WAKING_ITEMS + [True] * 2
    assert rank.finish() == list(range(1, WAKING_ITEMS + 3))


def test_a_running_thread_takes_steps_that_have_not_woken_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(device_of(monkeypatch), FakeRing())
    rank.thread.start({})
    rank.end_step(1)

    assert eventually(lambda: len(rank.written) == 1)
    rank.thread.stop(timeout_seconds=120.0)
