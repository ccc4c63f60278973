"""Tests of the record that a step's raw measurements make."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zerowatch.metrics.catalog.labels import PHASES
from zerowatch.metrics.step_record import CollectiveTotals, GenerationTotals, StepRecord
from zerowatch.runtime.common.phase_timer import BACKWARD, FORWARD, OPTIMIZER
from zerowatch.runtime.instrumentation.batch_shape import BatchShape
from zerowatch.runtime.instrumentation.device_phases import DevicePhaseTimes
from zerowatch.runtime.instrumentation.generated_tokens import GenerationCounts
from zerowatch.runtime.instrumentation.raw_step import RawStep, StepCounts
from zerowatch.runtime.memory.forecast.peak_readings import Shape
from zerowatch.runtime.memory.step_sample import StepMemorySample

NS = 1_000_000_000


class Comm(SimpleNamespace):
    """The sums over the calls of a step: 7 s, of which 5 s blocked the backward pass."""

    def __init__(self, **changes: Any) -> None:
        blocked_ns = [0] * len(PHASES)
        blocked_ns[BACKWARD] = 5 * NS
        fields = {
            "comm_seconds": 7.0,
            "exposed_seconds": 5.0,
            "is_upper_bound": True,
            "is_exposed_known": True,
            "blocked_ns": blocked_ns,
            "generation_calls": 13,
            "generation_gathers": 11,
            "generation_gathered_bytes": 170,
        }
        super().__init__(**(fields | changes))

    def totals(self) -> dict[str, CollectiveTotals]:
        return {"all_reduce": CollectiveTotals(calls=3, payload_bytes=5, wire_bytes=7, seconds=11)}


def in_phases(**seconds: int) -> list[int]:
    return [seconds.get(phase, 0) * NS for phase in PHASES]


def raw(**changes: Any) -> RawStep:
    fields: dict[str, Any] = {
        "step": 17,
        "ended_at": 1_790_000_000.5,
        "phase_ns": in_phases(forward=2, backward=8, generate=3),
        "intervals": (),
        "counts": StepCounts(micro_batches=3, samples=6, tokens=42, losses=[1.0, 2.0, 6.0]),
        "coverage": 0.75,
        "gradient_norm": 0.5,
        "learning_rate": 0.125,
        "loss_scale": 4096.0,
        "trace": None,
        "memory": None,
        "batch": SimpleNamespace(settled=lambda: True, lose=lambda: 3, expire=lambda: 5),
    }
    return RawStep(**(fields | changes))


def record(step: RawStep, **comm: Any) -> StepRecord:
    totals: Any = Comm(**comm)
    return step.record(totals, {"cpu": {"utilization_ratio": 0.5}}, {"cpu": 0.25})


def test_the_record_of_a_step_has_all_that_was_measured() -> None:
    memory = StepMemorySample(
        readings={"cpu": {"allocated": 3.0}},
        shapes=(Shape(2, 7), Shape(1, 9)),
        generation_peaks={"cuda:0": {"peak_allocated": 19.0}, "cpu": {"peak_reserved": 1.0}},
    )
    counts = StepCounts(
        micro_batches=3,
        samples=6,
        tokens=42,
        losses=[1.0, 2.0, 6.0],
        skipped=True,
        generation=GenerationCounts(calls=2, sequences=4, tokens=[10.0, 13.0]),
    )

    made = record(raw(memory=memory, counts=counts))

    assert made == StepRecord(
        step=17,
        ended_at_unix_seconds=1_790_000_000.5,
        seconds=13.0,
        phase_seconds={"forward": 2.0, "backward": 8.0, "generate": 3.0},
        micro_batches=3,
        samples=6,
        tokens=42,
        loss=3.0,
        nonfinite_loss=False,
        gradient_norm=0.5,
        learning_rate=0.125,
        loss_scale=4096.0,
        skipped=True,
        collectives={
            "all_reduce": CollectiveTotals(calls=3, payload_bytes=5, wire_bytes=7, seconds=11)
        },
        comm_seconds=7.0,
        comm_exposed_seconds=5.0,
        memory_bytes={"cpu": {"allocated": 3.0}},
        device_readings={"cpu": {"utilization_ratio": 0.5}},
        micro_batch_shapes=[(2, 7), (1, 9)],
        oom_risk_ratio={"cpu": 0.25},
        comm_exposed_phase_seconds={"backward": 5.0},
        comm_seconds_is_upper_bound=True,
        generation=GenerationTotals(
            calls=2,
            sequences=4,
            tokens=23,
            seconds=3.0,
            collectives=13,
            gathers=11,
            gathered_bytes=170,
            peak_bytes={"cuda:0": 19.0},
        ),
        phases_are_host_times=False,
    )


def test_the_record_has_the_peaks_of_the_steps_before_a_change_of_memory_use() -> None:
    memory = StepMemorySample(
        readings={
            "cuda:0": {"allocated": 3.0, "peak_allocated": 5.0, "peak_reserved": 9.0},
            "cpu": {"allocated": 2.0, "peak_allocated": 4.0},
        },
        shapes=(Shape(2, 7),),
        earlier_peaks={"cuda:0": {"peak_allocated": 8.0, "peak_reserved": 8.0}},
    )

    made = record(raw(memory=memory))

    assert made.memory_bytes == {
        "cuda:0": {"allocated": 3.0, "peak_allocated": 8.0, "peak_reserved": 9.0},
        "cpu": {"allocated": 2.0, "peak_allocated": 4.0},
    }
    assert made.peak_bytes_since_change == {"cuda:0": 5.0}


def test_a_step_without_a_sample_of_memory_has_none() -> None:
    counts = StepCounts(generation=GenerationCounts(calls=1, sequences=1, tokens=[3.0]))

    made = record(raw(counts=counts))

    assert (made.memory_bytes, made.micro_batch_shapes) == ({}, ())
    assert made.generation is not None
    assert made.generation.peak_bytes == {}


def test_a_step_that_generated_nothing_has_no_generation() -> None:
    assert record(raw()).generation is None


def test_exposed_time_that_is_not_known_is_in_no_phase() -> None:
    made = record(raw(), is_exposed_known=False)

    assert (made.comm_exposed_seconds, made.comm_exposed_phase_seconds) == (None, {})


def test_losses_that_the_script_has_divided_are_added_up() -> None:
    made = record(raw(counts=StepCounts(losses=[1.0, 2.0, 6.0], losses_are_divided=True)))

    assert made.loss == 9.0


@pytest.mark.parametrize(
    ("losses", "is_nonfinite"),
    [([1.0, float("nan")], True), ([float("inf")], True), ([1.0], False), ([], False)],
)
def test_a_loss_that_is_not_finite_is_marked(losses: list[Any], is_nonfinite: bool) -> None:
    made = record(raw(counts=StepCounts(losses=losses)))

    assert made.nonfinite_loss is is_nonfinite


def test_a_micro_batch_counts_all_its_forward_passes() -> None:
    counts = StepCounts()

    counts.add(
        [
            BatchShape(samples=2, tokens=14, sequence_length=7),
            BatchShape(samples=3, tokens=33, sequence_length=11),
        ],
        0.5,
    )
    counts.add([BatchShape(samples=5, tokens=None, sequence_length=None)], 0.25)

    assert counts == StepCounts(
        micro_batches=2, samples=10, tokens=47, sequence_length=11, losses=[0.5, 0.25]
    )


def test_shapes_that_cannot_be_read_leave_the_counts_unknown() -> None:
    counts = StepCounts()

    counts.add([BatchShape(samples=None, tokens=None, sequence_length=None)], None)

    assert (counts.micro_batches, counts.samples, counts.tokens) == (1, None, None)


def times(**fields: Any) -> DevicePhaseTimes:
    known = {"is_read": True, "phase_ns": in_phases(forward=5, backward=7), "discarded_ns": 3}
    return DevicePhaseTimes(**(known | fields))


def test_the_times_of_the_device_replace_those_of_the_host_and_end_with_the_step() -> None:
    step = raw(
        intervals=[(FORWARD, 100, 200), (OPTIMIZER, 200, 350)],
        device_phases=times(intervals=[(FORWARD, -90, -40), (BACKWARD, -40, 0)]),
        counts=StepCounts(discarded_ns=17),
    )

    step.use_device_phases()

    assert step.phase_ns == in_phases(forward=5, backward=7)
    assert step.counts.discarded_ns == 3
    assert step.intervals == [(FORWARD, 260, 310), (BACKWARD, 310, 350)]


def test_no_interval_is_made_if_no_traces_are() -> None:
    step = raw(device_phases=times(intervals=[(FORWARD, -90, 0)]))

    step.use_device_phases()

    assert step.intervals == ()


def test_times_that_the_device_has_lost_leave_those_of_the_host() -> None:
    step = raw(device_phases=times(phase_ns=None), counts=StepCounts(discarded_ns=17))

    step.use_device_phases()

    assert step.phase_ns == in_phases(forward=2, backward=8, generate=3)
    assert step.counts.discarded_ns == 17
    assert not step.phases_show_work
    assert record(step).phases_are_host_times


@pytest.mark.parametrize("device_phases", [None, times()])
def test_phases_of_the_device_that_computes_show_its_work(
    device_phases: DevicePhaseTimes | None,
) -> None:
    assert raw(device_phases=device_phases).phases_show_work


@pytest.mark.parametrize(
    ("is_read", "calls_ended", "settled"),
    [(True, True, True), (False, True, False), (True, False, False)],
)
def test_a_step_is_settled_once_phases_and_calls_are(
    is_read: bool, calls_ended: bool, settled: bool
) -> None:
    step = raw(
        device_phases=times(is_read=is_read), batch=SimpleNamespace(settled=lambda: calls_ended)
    )

    assert step.settled() is settled


def test_giving_up_returns_the_calls_whose_times_are_lost() -> None:
    assert (raw().lose(), raw().expire()) == (3, 5)
