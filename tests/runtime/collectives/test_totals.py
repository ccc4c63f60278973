"""Tests of the sums over a step's calls, against computed values."""

from __future__ import annotations

import pytest

from zerowatch.metrics.catalog.labels import OPS, PHASES
from zerowatch.runtime.collectives.call_batch import CallBatch
from zerowatch.runtime.collectives.collective_table import wire_factor
from zerowatch.runtime.collectives.comm_time import CommTime, CommTimeCounter, IntervalUnion
from zerowatch.runtime.collectives.groups import CollectiveCall
from zerowatch.runtime.collectives.totals import PeriodTotals, StepCommTotals

MS = 1_000_000


class FourRanks:
    """A process group of four ranks."""

    def __init__(self, role: str = "dp", backend: str = "gloo") -> None:
        self.role, self.backend, self.size = role, backend, 4
        self.busy_until_ns = self.maybe_busy_until_ns = -(2**63)

    def wire_factor(self, op: int, payload_bytes: int) -> float:
        return wire_factor(OPS[op], self.backend, self.size, payload_bytes)


def call(
    op: str, size: int, start_ms: int, end_ms: int, group: FourRanks | None = None
) -> CollectiveCall:
    made = CollectiveCall(OPS.index(op), group or FourRanks(), size, None, PHASES.index("backward"))
    made.start_ns, made.end_ns = start_ms * MS, end_ms * MS
    made.issued_ns = made.end_ns
    return made


def comm(calls: list[CollectiveCall]) -> CommTime:
    return CommTimeCounter().measure(CallBatch(calls))


def test_overlapping_intervals_count_once() -> None:
    union = IntervalUnion()

    seconds = union.add([(10 * MS, 30 * MS), (0, 20 * MS), (40 * MS, 50 * MS), (41 * MS, 42 * MS)])

    assert seconds == pytest.approx(0.040)


def test_no_interval_is_no_time() -> None:
    assert IntervalUnion().add([]) == 0.0


def test_intervals_may_lie_before_zero() -> None:
    assert IntervalUnion().add([(-30 * MS, -10 * MS), (-20 * MS, -5 * MS)]) == pytest.approx(0.025)


def test_an_instant_that_two_batches_cover_counts_once() -> None:
    clock = CommTimeCounter()

    first = clock.measure(CallBatch([call("all_reduce", 1, 0, 10)]))
    second = clock.measure(CallBatch([call("all_gather", 1, 5, 12)]))

    assert first.seconds == pytest.approx(0.010)
    assert second.seconds == pytest.approx(0.002)
    assert second.by_group == {"dp": pytest.approx(0.002)}


def test_batches_with_different_anchors_are_not_compared() -> None:
    clock = CommTimeCounter()
    anchor = object()  # an event; resolved times are relative to it

    measured = [
        clock.measure(CallBatch([call("all_reduce", 1, -30, 0)], anchor)).seconds for _ in range(10)
    ]

    assert sum(measured) == pytest.approx(0.300)


def test_calls_are_summed_by_operation_group_and_phase() -> None:
    dp, world = FourRanks(), FourRanks("world")

    tally = PeriodTotals()

    for calls in (
        [call("all_reduce", 100, 0, 4, dp), call("all_reduce", 20, 2, 6, dp)],
        [call("all_gather", 8, 10, 11, world)],
    ):
        tally.add(calls, comm(calls))

    reduced, gathered = tally.sums
    assert (reduced.op, reduced.group, reduced.phase) == ("all_reduce", "dp", "backward")
    assert (reduced.calls, reduced.payload_bytes, reduced.wire_bytes) == (2, 120, 180.0)
    assert reduced.seconds == pytest.approx([0.004, 0.004])
    assert (gathered.op, gathered.group) == ("all_gather", "world")
    assert (gathered.calls, gathered.payload_bytes, gathered.wire_bytes) == (1, 8, 6.0)
    assert tally.comm_seconds == {"dp": pytest.approx(0.006), "world": pytest.approx(0.001)}


def test_a_call_without_an_end_counts_and_is_not_timed() -> None:
    late = call("all_reduce", 100, 0, 0)
    late.timed = False
    step = StepCommTotals()

    step.add([late], comm([late]))

    assert step.totals()["all_reduce"].calls == 1
    assert step.totals()["all_reduce"].seconds is None
    assert step.seconds == 0.0


def test_a_step_adds_up_its_batches() -> None:
    step = StepCommTotals()

    for calls in (
        [call("all_reduce", 100, 0, 4), call("broadcast", 4, 4, 5)],
        [call("all_reduce", 20, 6, 8)],
    ):
        step.add(calls, comm(calls))

    assert step.totals()["all_reduce"].calls == 2
    assert step.totals()["all_reduce"].payload_bytes == 120
    assert step.totals()["all_reduce"].seconds == pytest.approx(0.006)
    assert step.totals()["broadcast"].calls == 1
    assert step.seconds == pytest.approx(0.007)


@pytest.mark.parametrize(
    ("op", "backend", "size", "factor"),
    [
        ("all_reduce", "nccl", 4, 1.5),
        ("all_reduce", "gloo", 2, 1.0),
        ("reduce_scatter", "nccl", 4, 0.75),
        ("reduce_scatter", "gloo", 4, 1.5),
        ("all_gather", "gloo", 8, 0.875),
        ("all_to_all", "nccl", 2, 0.5),
        ("gather", "gloo", 4, 0.1875),  # three of four parts move, and four ranks share them
        ("broadcast", "gloo", 2, 0.5),
        ("reduce", "gloo", 2, 0.75),
        ("reduce", "nccl", 4, 0.75),
        ("send", "gloo", 2, 1.0),
        ("recv", "gloo", 2, 0.0),
        ("all_reduce", "gloo", 1, 0.0),
    ],
)
def test_wire_bytes_follow_the_backends_algorithm(op, backend, size, factor) -> None:
    assert wire_factor(op, backend, size) == pytest.approx(factor)


def test_own_collectives_count_as_time_and_not_as_operations_of_the_training() -> None:
    own, period, step = FourRanks("zerowatch"), PeriodTotals(), StepCommTotals()
    calls = [call("all_gather", 40, 0, 20, own), call("all_reduce", 100, 20, 50)]
    taken = comm(calls)

    period.add(calls, taken)
    step.add(calls, taken)

    assert step.exposed_seconds == pytest.approx(0.050)
    assert list(step.totals()) == ["all_reduce"]
    assert period.comm_seconds == pytest.approx({"zerowatch": 0.020, "dp": 0.030})
    assert {(sums.op, sums.group) for sums in period.sums} == {
        ("all_gather", "zerowatch"),
        ("all_reduce", "dp"),
    }


def test_the_time_that_calls_block_the_host_does_not_count_as_a_wait_of_the_device() -> None:
    vote = call("all_reduce", 8, 0, 30)
    on_device = call("all_reduce", 8, 40, 50)
    vote.issued_ns, on_device.issued_ns = vote.end_ns, on_device.end_ns
    on_device.start_event = object()
    calls, totals = [vote, on_device], StepCommTotals()
    totals.add(calls, comm(calls))
    backward = PHASES.index("backward")

    assert totals.blocked_ns[backward] == 40 * MS
    assert totals.device_blocked_ns() == [0, 0, 10 * MS, 0, 0, 0, 0, 0]


def test_between_the_passes_a_device_waits_with_the_host() -> None:
    vote = call("all_gather", 8, 0, 30)
    vote.issued_ns, vote.phase = vote.end_ns, PHASES.index("other")
    totals = StepCommTotals()
    totals.add([vote], comm([vote]))

    assert totals.device_blocked_ns() == totals.blocked_ns
    assert sum(totals.device_blocked_ns()) == 30 * MS


def test_gathers_in_generation_are_counted_apart() -> None:
    calls = [
        call("all_gather", 8, 0, 1),  # in backward
        call("all_gather", 100, 1, 2),
        call("all_gather", 20, 2, 3),
        call("all_reduce", 8, 3, 4),  # such as whether any rank still generates
    ]
    for each in calls[1:]:
        each.phase = PHASES.index("generate")
    totals = StepCommTotals()

    totals.add(calls, comm(calls))

    assert totals.generation_calls == 3
    assert (totals.generation_gathers, totals.generation_gathered_bytes) == (2, 120)
    assert totals.totals()["all_gather"].calls == 3


def blocked(step: StepCommTotals) -> dict[str, float]:
    """Return the milliseconds in which calls blocked training, by phase."""
    return {PHASES[place]: ns / MS for place, ns in enumerate(step.blocked_ns) if ns}


@pytest.mark.parametrize("on_device", [True, False])
def test_a_wait_in_another_phase_blocks_that_phase(on_device: bool) -> None:
    waited = call("all_reduce", 8, 0, 50)
    waited.issued_ns, waited.wait_ns = 3 * MS, 30 * MS
    waited.wait_phase = PHASES.index("optimizer")
    if on_device:
        waited.start_event = object()  # type: ignore[assignment]
    step = StepCommTotals()

    step.add([waited], comm([waited]))

    assert blocked(step) == {"backward": 3, "optimizer": 20}
    assert step.exposed_seconds == pytest.approx(0.023)
    on_host = [0 if on_device else ns for ns in step.blocked_ns]
    assert step.host_blocked_ns == on_host


def test_a_call_that_is_lost_makes_the_times_of_the_step_unknown() -> None:
    known, lost = call("all_reduce", 100, 0, 4), call("all_reduce", 20, 5, 9)
    lost.timed, lost.is_lost = False, True
    step = StepCommTotals()

    step.add([known, lost], comm([known, lost]))

    assert (step.comm_seconds, step.is_exposed_known, step.is_upper_bound) == (None, False, False)
    found = step.totals()["all_reduce"]
    assert (found.calls, found.payload_bytes, found.wire_bytes) == (2, 120, 180.0)
    assert found.seconds == pytest.approx(0.004)


@pytest.mark.parametrize(
    ("timed", "comm_seconds", "is_upper_bound"), [(True, 0.004, True), (False, None, False)]
)
def test_a_call_whose_end_is_only_bounded_makes_the_communication_a_bound(
    timed: bool, comm_seconds: float | None, is_upper_bound: bool
) -> None:
    bounded = call("all_reduce", 100, 0, 4)
    bounded.is_bound, bounded.timed = True, timed
    step = StepCommTotals()

    step.add([bounded], comm([bounded]))

    assert step.comm_seconds == comm_seconds
    assert (step.is_upper_bound, step.is_exposed_known) == (is_upper_bound, True)


def test_a_batch_without_all_calls_leaves_the_exposed_time_unknown() -> None:
    step = StepCommTotals()

    step.add([], CommTime(0.5, {}, is_complete=False))
    step.add([], CommTime(0.25, {}))

    assert (step.seconds, step.is_exposed_known, step.comm_seconds) == (0.75, False, None)


def test_calls_that_are_bounded_have_no_duration_in_a_period() -> None:
    dp = FourRanks()
    exact, bounded = call("broadcast", 8, 0, 3, dp), call("broadcast", 16, 5, 10, dp)
    bounded.is_bound = True
    period = PeriodTotals()

    period.add([exact, bounded], comm([exact, bounded]))
    period.add([], CommTime(0.5, {"dp": 0.5, "tp": 0.25}))

    [sums] = period.sums
    assert (sums.calls, sums.payload_bytes, sums.wire_bytes) == (2, 24, 18.0)
    assert sums.seconds == [pytest.approx(0.003)]
    assert period.comm_seconds == pytest.approx({"dp": 0.008 + 0.5, "tp": 0.25})
    assert period.seconds == pytest.approx(0.008 + 0.5)


def test_calls_of_several_groups_are_measured_apart_and_together() -> None:
    dp, tp = FourRanks("dp"), FourRanks("tp")
    calls = [call("all_reduce", 8, 0, 10, dp), call("all_gather", 8, 4, 17, tp)]

    taken = comm(calls)

    assert taken.seconds == pytest.approx(0.017)
    assert taken.by_group == pytest.approx({"dp": 0.010, "tp": 0.013})
    assert taken.is_complete


def test_a_group_that_was_busy_over_a_new_anchor_may_be_busy_for_ever() -> None:
    clock, busy, free = CommTimeCounter(), FourRanks("dp"), FourRanks("tp")
    busy.busy_until_ns, free.busy_until_ns = 1, 0
    calls = [call("all_reduce", 8, -30, -10, group) for group in (busy, free)]
    for each in calls:
        each.start_event = object()  # type: ignore[assignment]

    clock.measure(CallBatch(calls, object()))  # type: ignore[arg-type]

    assert [each.is_bound for each in calls] == [True, False]
    assert [each.duration_ns for each in calls] == [20 * MS, 20 * MS]


def test_each_batch_has_a_number() -> None:
    clock, calls = CommTimeCounter(), [call("all_reduce", 8, 0, 1), call("all_reduce", 8, 2, 3)]

    for each in calls:
        clock.measure(CallBatch([each]))

    assert [each.batch for each in calls] == [1, 2]
