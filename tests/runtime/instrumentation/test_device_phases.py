"""Tests of the phases on an accelerator, `device_phases.py`: a fake device that lags behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from fakes.cuda_streams import FakeCuda
from fakes.sleeping_collectives import ManualClock

from zerowatch.metrics.catalog.labels import PHASES
from zerowatch.runtime.collectives.call_batch import CallBatch
from zerowatch.runtime.collectives.event_pool import EventPool
from zerowatch.runtime.collectives.totals import StepCommTotals
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.phase_timer import (
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PhaseTimer,
)
from zerowatch.runtime.cross_rank.stragglers import (
    MIN_STEPS,
    WARM_UP_STEPS,
    StepTimeSampler,
    StragglerDetector,
    step_time_reference,
)
from zerowatch.runtime.instrumentation import device_phases
from zerowatch.runtime.instrumentation.device_phases import MAX_LOST, DevicePhases
from zerowatch.runtime.instrumentation.raw_step import RawStep, StepCounts

LAUNCH_MS = 1.0  # what the host needs to queue a pass


class Rank:
    """A rank that queues its passes on one device, and takes its steps as the hooks do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = ManualClock()
        self.cuda = FakeCuda(self.host)
        self.cuda.patch(monkeypatch)
        self.events = EventPool()
        self.device = DevicePhases(self.events)
        self.timer = PhaseTimer(self.host)
        self.timer.on_interval_end = self.device.mark
        self.timer.record_intervals()

    @contextmanager
    def phase(self, phase: int) -> Iterator[None]:
        self.timer.enter(phase)
        yield
        self.timer.leave()

    def load(self, milliseconds: float) -> None:
        with self.phase(DATA):
            self.host.elapse(milliseconds)

    def queue(self, phase: int, milliseconds: float) -> None:
        with self.phase(phase):
            self.cuda.current.run(milliseconds)
            self.host.elapse(LAUNCH_MS)

    def train(self) -> RawStep:
        self.queue(FORWARD, 20)
        self.queue(BACKWARD, 40)
        self.queue(OPTIMIZER, 10)
        return self.end_step()

    def end_step(self) -> RawStep:
        return RawStep(
            step=1,
            ended_at=0.0,
            phase_ns=self.timer.drain(),
            intervals=self.timer.drain_intervals(),
            counts=StepCounts(),
            coverage=None,
            gradient_norm=None,
            learning_rate=None,
            loss_scale=None,
            trace=None,
            memory=None,
            batch=CallBatch([]),
            device_phases=self.device.end_step(),
        )

    def read(self, step: RawStep) -> dict[str, float]:
        """Wait for the device, and return the milliseconds of each phase of a step."""
        self.cuda.synchronize()
        self.device.read()
        assert step.settled()
        step.use_device_phases()
        return {name: ns / 1e6 for name, ns in zip(PHASES, step.phase_ns, strict=True) if ns}


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


def test_a_phase_lasts_as_long_as_the_device_computes_and_not_as_long_as_the_host_queues(rank):
    step = rank.train()

    assert rank.read(step) == pytest.approx({"forward": 20, "backward": 40, "optimizer": 10})


def test_a_wait_of_the_host_for_the_loss_is_time_of_the_passes_and_not_of_the_script(rank):
    rank.queue(FORWARD, 20)
    rank.queue(BACKWARD, 40)
    rank.cuda.current.synchronize()  # as loss.item() does
    rank.queue(OPTIMIZER, 10)
    step = rank.end_step()

    assert step.phase_ns[OTHER] > 50e6
    assert rank.read(step) == pytest.approx({"forward": 20, "backward": 40, "optimizer": 10})


def test_time_in_which_the_clock_is_stopped_is_not_timed_on_the_device_either(rank):
    rank.train()
    rank.host.elapse(100)
    rank.timer.stop()
    rank.host.elapse(5000)
    step = rank.train()

    assert rank.read(step) == pytest.approx({"forward": 20, "backward": 40, "optimizer": 10})


def test_loading_counts_only_while_the_device_has_nothing_left_to_do(rank):
    rank.train()  # 70 ms of work, queued in 3 ms
    rank.load(30)
    hidden = rank.train()
    rank.load(200)  # at its beginning the device has 104 ms of work left
    partly_hidden = rank.train()

    assert rank.read(hidden) == pytest.approx({"forward": 20, "backward": 40, "optimizer": 10})
    assert rank.read(partly_hidden)["data"] == pytest.approx(96)


def test_a_host_that_is_slower_than_the_device_leaves_the_time_to_the_phase_that_it_is_in(rank):
    with rank.phase(FORWARD):
        for _ in range(10):
            rank.cuda.current.run(1)
            rank.host.elapse(5)  # launching takes longer than the kernels
    rank.host.elapse(30)  # the script's own Python
    rank.queue(BACKWARD, 40)
    step = rank.end_step()

    assert rank.read(step) == pytest.approx({"forward": 50, "other": 30, "backward": 40})


def test_the_phases_of_all_steps_add_up_to_the_time_from_the_first_phase_to_the_last(rank):
    started = rank.host.now_ns
    steps = []
    for loading in (0, 30, 200, 5):
        rank.load(loading)
        steps.append(rank.train())
    milliseconds = sum(sum(rank.read(step).values()) for step in steps)

    assert milliseconds == pytest.approx((rank.cuda.current.busy_until - started) / 1e6)


def test_a_step_is_not_complete_before_the_device_has_ended_it(rank):
    step = rank.train()
    rank.device.read()

    assert not step.settled()


def test_the_times_are_those_of_the_host_in_a_step_in_which_a_graph_is_captured(rank):
    rank.train()
    rank.cuda.capturing = True
    rank.timer.enter(FORWARD)
    rank.cuda.capturing = False
    rank.host.elapse(7)
    rank.timer.leave()
    captured, after = rank.end_step(), rank.train()

    assert rank.read(captured) == pytest.approx({"forward": 7})
    assert not captured.phases_show_work
    assert rank.read(after) == pytest.approx({"forward": 20, "backward": 40, "optimizer": 10})
    assert after.phases_show_work


def test_a_step_whose_first_mark_is_missing_is_lost_too(rank):
    rank.train()
    rank.queue(FORWARD, 20)
    rank.cuda.capturing = True
    ends_in_a_capture = rank.end_step()
    rank.cuda.capturing = False
    after, later = rank.train(), rank.train()
    rank.cuda.synchronize()
    rank.device.read()

    lost = [not step.phases_show_work for step in (ends_in_a_capture, after, later)]
    assert lost == [True, True, False]


def test_passes_that_were_discarded_are_counted_by_the_device(rank):
    rank.train()
    rank.queue(FORWARD, 20)
    rank.queue(BACKWARD, 40)
    rank.device.discard()
    step = rank.train()
    rank.read(step)

    assert step.counts.discarded_ns / 1e6 == pytest.approx(60)


def test_the_intervals_of_a_trace_end_where_the_host_ended_the_step(rank):
    rank.train()
    step = rank.train()
    rank.read(step)

    end_ns = rank.host.now_ns  # of the device; the host was ahead
    assert step.intervals[-1][2] < end_ns
    lengths = [(phase, (end - start) / 1e6) for phase, start, end in step.intervals if end > start]
    assert lengths == [(FORWARD, 20), (BACKWARD, 40), (OPTIMIZER, 10)]


def test_a_long_run_uses_the_events_of_two_steps(rank):
    for _ in range(100):
        rank.read(rank.train())

    assert rank.cuda.num_events <= 2 * 7


def test_a_long_evaluation_between_steps_keeps_no_marks_that_the_device_has_passed(rank):
    rank.train()
    for _ in range(1000):
        rank.load(1)
        rank.cuda.synchronize()
        rank.device.read()

    assert rank.cuda.num_events <= 10
    assert rank.read(rank.train())["data"] == pytest.approx(1000, rel=0.1)


def fail_to_read(*_: object) -> None:
    raise RuntimeError("CUDA error: device-side assert triggered")


def test_an_event_that_cannot_be_read_loses_its_step_only(rank, monkeypatch):
    rank.read(rank.train())
    lost = rank.train()
    rank.cuda.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(rank.cuda.Event, "elapsed_time", fail_to_read)
        with pytest.raises(RuntimeError, match="assert"):
            rank.device.read()
    later = rank.train()

    assert rank.read(lost)["forward"] == pytest.approx(LAUNCH_MS)
    assert not lost.phases_show_work
    assert rank.read(later) == pytest.approx({"forward": 20, "backward": 40, "optimizer": 10})


def test_events_that_cannot_be_read_end_the_times_of_the_device_but_no_step(
    rank, monkeypatch, caplog
):
    step = rank.train()
    rank.cuda.synchronize()
    monkeypatch.setattr(rank.cuda.Event, "query", fail_to_read)
    for _ in range(MAX_LOST):
        with pytest.raises(RuntimeError, match="assert"):
            rank.device.read()
    later = rank.train()
    records = [each.record(StepCommTotals(), {}, {}) for each in (step, later)]

    assert [each.settled() for each in (step, later)] == [True, True]
    assert rank.read(later)["forward"] == pytest.approx(LAUNCH_MS)
    assert [record.phases_are_host_times for record in records] == [True, True]
    assert "times of the host" in caplog.text


def test_a_step_in_which_an_event_could_not_be_recorded_is_lost(rank, monkeypatch):
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    rank.train()
    rank.timer.on_interval_end = FailOpen().wrap("device phases", rank.device.mark)
    rank.timer.enter(FORWARD)
    with monkeypatch.context() as patch:
        patch.setattr(EventPool, "record", fail)
        rank.timer.leave()
    lost = rank.end_step()
    rank.train()  # a gap is closed by the first mark after it
    rank.cuda.synchronize()
    rank.device.read()

    assert not lost.phases_show_work
    assert rank.read(rank.train()) == pytest.approx(
        {"forward": 20, "backward": 40, "optimizer": 10}
    )


def test_marks_that_nobody_reads_are_bounded(rank, monkeypatch):
    monkeypatch.setattr(device_phases, "MAX_MARKS", 20)
    steps = [rank.train() for _ in range(50)]

    assert rank.cuda.num_events <= 20
    rank.cuda.synchronize()
    rank.device.read()
    assert all(step.settled() for step in steps)
    rank.train()  # its beginning is not marked
    assert rank.read(rank.train()) == pytest.approx(
        {"forward": 20, "backward": 40, "optimizer": 10}
    )


def test_the_events_mark_the_compute_stream_whichever_stream_is_current(rank):
    side = rank.cuda.new_stream()
    rank.timer.enter(FORWARD)
    rank.cuda.current.run(20)
    with rank.cuda.stream(side):
        side.run(500)
        rank.timer.leave()
    step = rank.end_step()

    assert rank.read(step) == pytest.approx({"forward": 20})


def test_a_rank_with_a_slow_device_is_a_straggler_although_its_host_queues_as_fast(monkeypatch):
    step_times = {}
    for number, forward_ms in enumerate((20, 20, 30)):
        rank, sampler = Rank(monkeypatch), StepTimeSampler()
        for _ in range(WARM_UP_STEPS + MIN_STEPS):
            rank.queue(FORWARD, forward_ms)
            rank.queue(BACKWARD, 40)
            step = rank.end_step()
            rank.read(step)
            sampler.add(step.phase_ns, [0] * len(PHASES))
        step_times[number] = sampler.drain()
    reference = step_time_reference(list(step_times.values()))
    detector = StragglerDetector()
    detector.update(step_times, reference)
    (straggler,) = detector.update(step_times, reference)

    assert (straggler.rank, straggler.phase) == (2, "forward")
    assert straggler.seconds == pytest.approx(0.010)
