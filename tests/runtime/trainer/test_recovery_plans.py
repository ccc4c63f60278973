"""How windows are cut after memory ran out, and when the guard is armed, on plain numbers."""

from __future__ import annotations

import pytest
from fakes.escalation import FakeEscalation

from zerowatch.runtime.trainer.oom_recovery.escalation import EngineChange, EscalationPolicy
from zerowatch.runtime.trainer.oom_recovery.fit import (
    MemoryMeasurements,
    PeakSample,
    largest_fitting,
    smaller_size,
)
from zerowatch.runtime.trainer.oom_recovery.guard_schedule import CLEAN_WINDOWS, GuardSchedule, asks
from zerowatch.runtime.trainer.oom_recovery.micro_batch_planner import (
    BatchShares,
    MicroBatchPlanner,
    suggest_size,
)
from zerowatch.runtime.trainer.oom_recovery.sizing import (
    GROW_AFTER,
    UNBOUND,
    MicroBatchLimits,
    bucket_of,
)

GIB = 2**30
LENGTH = 100
NOTHING = MemoryMeasurements(peaks=(), limit_bytes=None)


def line(sizes: list[int], base: float = 10.0, each: float = 2.0) -> list[PeakSample]:
    return [
        PeakSample(samples=size, length=LENGTH, peak_bytes=base + each * size) for size in sizes
    ]


def test_peaks_of_two_sizes_tell_the_largest_that_fits() -> None:
    assert smaller_size(12, line([2, 4]), limit_bytes=30 / 0.95) == 10


def test_without_peaks_of_two_sizes_it_is_the_half_rounded_up() -> None:
    assert [smaller_size(size, line([2, 2]), limit_bytes=30) for size in (9, 8, 3, 2)] == [
        5,
        4,
        2,
        1,
    ]


def test_a_line_that_claims_the_failing_size_to_fit_is_not_believed() -> None:
    assert smaller_size(6, line([2, 4]), limit_bytes=10 * GIB) == 3


def test_a_line_that_falls_tells_nothing() -> None:
    assert largest_fitting(line([2, 4], each=-1.0), limit_bytes=100) is None


def test_the_line_lies_above_every_peak() -> None:
    peaks = [*line([2, 4, 8]), PeakSample(samples=4, length=LENGTH, peak_bytes=28.0)]

    fitting = largest_fitting(peaks, limit_bytes=40 / 0.95)

    assert fitting is not None
    assert fitting < 11


def test_a_single_sample_cannot_be_halved() -> None:
    assert smaller_size(1, line([2, 4]), limit_bytes=30) is None


def test_where_not_even_one_is_expected_to_fit_one_is_tried() -> None:
    assert smaller_size(4, line([2, 3]), limit_bytes=5) == 1


def test_only_peaks_of_alike_lengths_count() -> None:
    share = BatchShares(samples=[12], wanted=[12], length=LENGTH)
    elsewhere = [PeakSample(samples=n, length=2 * LENGTH, peak_bytes=10 + 2 * n) for n in (2, 4)]

    told = suggest_size(share, 12, MemoryMeasurements(peaks=elsewhere, limit_bytes=30))

    assert told == 6


def test_lengths_up_to_a_power_of_two_share_a_bucket() -> None:
    assert bucket_of(65) == bucket_of(128) != bucket_of(129)
    assert bucket_of(0) == bucket_of(1)


def test_what_ran_out_bounds_longer_batches_and_not_shorter_ones() -> None:
    sizing = MicroBatchLimits().after_out_of_memory(LENGTH, failing=8, suggested=4)

    assert [sizing.bound(length) for length in (20, 100, 1000)] == [UNBOUND, 4, 4]


def test_a_size_that_fitted_is_preferred_to_a_smaller_guess() -> None:
    sizing = MicroBatchLimits().after_clean(LENGTH, ran=6)

    sizing = sizing.after_out_of_memory(LENGTH, failing=8, suggested=4)

    assert sizing.bound(LENGTH) == 6


def test_what_fitted_once_and_fails_now_is_no_longer_trusted() -> None:
    sizing = MicroBatchLimits().after_clean(LENGTH, ran=6)

    sizing = sizing.after_out_of_memory(LENGTH, failing=6, suggested=3)
    sizing = sizing.after_out_of_memory(LENGTH, failing=5, suggested=3)

    assert sizing.bound(LENGTH) == 4  # of 6, one less may still fit, and then one less again


def grown(sizing: MicroBatchLimits, fits: int, windows: int) -> tuple[MicroBatchLimits, list[int]]:
    """Train on through many windows; returns what ran out on the way."""
    failed = []
    for _ in range(windows):
        size = sizing.bound(LENGTH)
        if size > fits:
            failed.append(size)
            sizing = sizing.after_out_of_memory(LENGTH, size, -(-size // 2))
        else:
            sizing = sizing.after_clean(LENGTH, ran=size)
    return sizing, failed


def test_sizes_grow_back_to_what_fits_and_no_failing_size_is_tried_twice() -> None:
    sizing = MicroBatchLimits().after_out_of_memory(LENGTH, failing=32, suggested=4)

    sizing, failed = grown(sizing, fits=11, windows=20 * GROW_AFTER)

    assert sizing.bound(LENGTH) == 11
    assert len(failed) == len(set(failed))
    assert all(11 < size < 32 for size in failed)
    assert grown(sizing, fits=11, windows=10 * GROW_AFTER)[1] == []


def test_after_a_change_what_failed_is_tried_again() -> None:
    sizing = MicroBatchLimits().after_out_of_memory(LENGTH, failing=5, suggested=4)
    assert grown(sizing, fits=100, windows=5 * GROW_AFTER)[0].bound(LENGTH) == 4

    sizing, _ = grown(sizing.forgotten(), fits=100, windows=GROW_AFTER)

    assert sizing.bound(LENGTH) == 8


def test_windows_that_are_small_anyway_prove_nothing_of_the_bound() -> None:
    sizing = MicroBatchLimits().after_out_of_memory(LENGTH, failing=8, suggested=4)

    for _ in range(3 * GROW_AFTER):
        sizing = sizing.after_clean(LENGTH, ran=2)

    assert sizing.bound(LENGTH) == 4


def test_the_rank_that_needs_most_micro_batches_decides() -> None:
    plans = MicroBatchPlanner()
    share = BatchShares(samples=[15, 1], wanted=[8, 2], length=LENGTH)
    assert plans.micro_batches(share) == 2

    plans.ran_out(share, failing=8, suggested=4)

    assert plans.micro_batches(share) == 4
    assert share.largest(4) == [4, 1]


def test_the_guard_is_armed_at_first_and_after_three_clean_windows_no_more() -> None:
    plans = MicroBatchPlanner()
    share = BatchShares(samples=[8], wanted=[8], length=LENGTH)

    armed = []
    for _ in range(CLEAN_WINDOWS + 2):
        armed.append(plans.begin(share, asked=False))
        plans.on_success(share, 1)

    assert armed == [True] * CLEAN_WINDOWS + [False, False]


def disarmed() -> GuardSchedule:
    return GuardSchedule(windows_left=0, longest=LENGTH)


def test_a_longer_batch_a_rank_that_asks_or_a_change_arm_it_again() -> None:
    assert not disarmed().before(longest=LENGTH, asked=False).is_armed
    assert disarmed().before(longest=LENGTH + 1, asked=False).is_armed
    assert disarmed().before(longest=LENGTH, asked=True).is_armed
    assert disarmed().after_change().is_armed


def test_larger_micro_batches_arm_it_and_smaller_ones_do_not() -> None:
    plans = MicroBatchPlanner()
    for wanted, expected in ((4, True), (2, False), (8, True)):
        plans.arming = disarmed() if plans.arming.longest else GuardSchedule()

        assert (
            plans.begin(BatchShares(samples=[8], wanted=[wanted], length=1), asked=False)
            == expected
        )
        plans.on_success(BatchShares(samples=[8], wanted=[wanted], length=1), 8)


@pytest.mark.parametrize(
    ("changed", "headroom", "limit", "expected"),
    [
        (True, None, None, True),
        (False, None, 10 * GIB, False),
        (False, 0.5 * GIB, None, False),
        (False, 0.5 * GIB, 10 * GIB, True),
        (False, 1.0 * GIB, 10 * GIB, False),
    ],
)
def test_a_rank_asks_for_the_guard_where_its_headroom_is_low(
    changed: bool, headroom: float | None, limit: float | None, expected: bool
) -> None:
    assert asks(is_changed=changed, headroom_bytes=headroom, limit_bytes=limit) == expected


def test_escalations_are_applied_in_their_order_past_what_changes_nothing() -> None:
    checkpointing, buckets, rebuild = (
        EngineChange.ACTIVATION_CHECKPOINTING,
        EngineChange.MINIMAL_BUCKETS,
        EngineChange.REBUILD,
    )
    called = []

    def escalation(change: EngineChange, has_effect: bool) -> FakeEscalation:
        return FakeEscalation(change, lambda: called.append(change) or has_effect)

    policy = EscalationPolicy(
        [escalation(rebuild, True), escalation(checkpointing, True), escalation(buckets, False)]
    )

    applied = [policy.apply_next(lambda value: value) for _ in range(3)]

    assert applied == [checkpointing, rebuild, None]
    assert called == [checkpointing, buckets, rebuild]
    assert policy.applied == [checkpointing, rebuild]


def test_an_escalation_counts_as_applied_on_all_ranks_if_it_changed_anything_on_one() -> None:
    policy = EscalationPolicy([FakeEscalation(EngineChange.MINIMAL_BUCKETS, lambda: False)])

    assert policy.apply_next(lambda _: 1) is EngineChange.MINIMAL_BUCKETS
