"""Tests of micro-batch sizes after out-of-memory errors, and of when the guard is on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from zerowatch.runtime.trainer.oom_recovery.micro_batch_planner import (
    CLEAN_WINDOWS,
    GROW_AFTER,
    UNBOUND,
    GuardSchedule,
    MemoryMeasurements,
    MicroBatchLimits,
    MicroBatchPlanner,
    PeakHistory,
    PeakSample,
    largest_fitting,
    length_bucket,
    needs_guard,
    size_after_oom,
    smaller_size,
)
from zerowatch.runtime.trainer.window.window_agreement import LocalBatches

GIB = 2**30
LENGTH = 100
NOTHING = MemoryMeasurements(peaks=(), limit_bytes=None)


def line(sizes: list[int], base: float = 10.0, each: float = 2.0) -> list[PeakSample]:
    return [
        PeakSample(samples=size, length=LENGTH, peak_bytes=base + each * size) for size in sizes
    ]


def test_peaks_of_two_sizes_predict_the_largest_size_that_fits() -> None:
    assert smaller_size(12, line([2, 4]), limit_bytes=30 / 0.95) == 10


def test_the_limit_of_a_replay_is_read_when_the_replay_is_planned() -> None:
    limits: list[float | None] = [60.0, None]
    listeners: list[Callable[[Any], None]] = []
    watch = SimpleNamespace(
        subscribe_internal=listeners.append, memory_limit_bytes=lambda device: limits.pop(0)
    )
    history = PeakHistory(watch, "cuda:0")
    listeners[0](
        SimpleNamespace(
            memory_bytes={"cuda:0": {"peak_allocated": 50.0, "limit": 80.0}},
            micro_batch_shapes=[(4, 1)],
            peak_bytes_since_change={},
            step=1,
        )
    )

    assert [history.measured().limit_bytes for _ in range(2)] == [60.0, 80.0]


def recorded(
    *shapes: tuple[int, int],
    peak: float | None = 50.0,
    limit: float | None = 100.0,
    step: int = 1,
    since_change: float | None = None,
) -> Any:
    """Return a record of a step on a GPU, whose micro-batches have these shapes."""
    states = {"peak_allocated": peak, "limit": limit}
    known = {state: value for state, value in states.items() if value is not None}
    return SimpleNamespace(
        memory_bytes={"cuda:0": known},
        micro_batch_shapes=list(shapes),
        peak_bytes_since_change={} if since_change is None else {"cuda:0": since_change},
        step=step,
    )


def history_of(*records: Any, starts: Sequence[tuple[int, int]] = ()) -> PeakHistory:
    """Return the history of records after windows, each with its step and configuration."""
    listeners: list[Callable[[Any], None]] = []
    watch = SimpleNamespace(
        subscribe_internal=listeners.append, memory_limit_bytes=lambda device: None
    )
    history = PeakHistory(watch, "cuda:0")
    for step, configuration in starts:
        history.on_window_start(step=step, configuration=configuration)
    for record in records:
        listeners[0](record)
    return history


def test_the_peak_of_a_step_belongs_to_its_micro_batch_of_the_most_elements() -> None:
    history = history_of(recorded((8, 10), (4, 100), (6, 20)))

    assert history.measured().peaks == (PeakSample(samples=4, length=100, peak_bytes=50.0),)


def test_the_peak_of_a_step_with_other_micro_batches_than_before_is_that_since_the_change() -> None:
    history = history_of(recorded((4, 1), peak=90.0, since_change=50.0))

    assert history.measured().peaks == (PeakSample(samples=4, length=1, peak_bytes=50.0),)


def test_a_step_without_a_peak_or_without_a_shape_is_left_out_and_a_limit_is_kept() -> None:
    records = (
        recorded((4, 1)),
        recorded((4, 1), peak=None),
        recorded(),
        recorded((4, 1), limit=None),
    )

    measured = history_of(*records).measured()

    assert len(measured.peaks) == 2
    assert measured.limit_bytes == 100.0


@pytest.mark.parametrize(
    ("starts", "configurations"),
    [
        ([(1, 0), (2, 0), (3, 1), (4, 0)], [0, 0, 1, 0]),
        ([(10, 0), (11, 1), (1, 1), (2, 1), (3, 0)], [1, 1, 0, 0]),  # a checkpoint was loaded
    ],
)
def test_a_late_peak_belongs_to_the_configuration_of_its_step(
    starts: list[tuple[int, int]], configurations: list[int]
) -> None:
    history = history_of(*[recorded((4, 1), step=step) for step in (1, 2, 3, 4)], starts=starts)

    assert [each.configuration for each in history.measured().peaks] == configurations


def test_memory_is_low_after_a_step_whose_peak_came_near_the_limit_and_not_before() -> None:
    steps = [recorded((4, 1), peak=peak) for peak in (50.0, 99.0, 50.0)]

    assert [history_of(*steps[:count]).is_low for count in range(4)] == [False, False, True, False]


def test_without_peaks_of_two_sizes_the_size_is_halved_rounded_up() -> None:
    assert [smaller_size(size, line([2, 2]), limit_bytes=30) for size in (9, 8, 3, 2)] == [
        5,
        4,
        2,
        1,
    ]


def test_a_fitted_line_that_contradicts_the_failure_is_ignored() -> None:
    assert smaller_size(6, line([2, 4]), limit_bytes=10 * GIB) == 3


def test_a_fitted_line_that_predicts_the_size_that_failed_is_ignored() -> None:
    assert smaller_size(10, line([2, 4]), limit_bytes=30 / 0.95) == 5


def test_a_fitted_line_with_a_negative_slope_gives_no_size() -> None:
    assert largest_fitting(line([2, 4], each=-1.0), limit_bytes=100) is None


def test_the_fitted_line_lies_above_every_peak() -> None:
    peaks = [*line([2, 4, 8]), PeakSample(samples=4, length=LENGTH, peak_bytes=28.0)]

    fitting = largest_fitting(peaks, limit_bytes=40 / 0.95)

    assert fitting is not None
    assert fitting < 11


def test_a_single_sample_that_fails_gives_no_smaller_size() -> None:
    assert smaller_size(1, line([2, 4]), limit_bytes=30) is None


def test_where_not_even_one_sample_is_predicted_to_fit_one_is_tried() -> None:
    assert smaller_size(4, line([2, 3]), limit_bytes=5) == 1


def test_only_peaks_of_the_same_length_bucket_are_used() -> None:
    local_batches = LocalBatches(samples=[12], micro_batch_samples=[12], length=LENGTH)
    elsewhere = [PeakSample(samples=n, length=2 * LENGTH, peak_bytes=10 + 2 * n) for n in (2, 4)]

    next_size = size_after_oom(
        local_batches, 12, MemoryMeasurements(peaks=elsewhere, limit_bytes=30)
    )

    assert next_size == 6


def test_lengths_up_to_a_power_of_two_share_a_bucket() -> None:
    assert length_bucket(65) == length_bucket(128) != length_bucket(129)
    assert length_bucket(0) == length_bucket(1)


def test_a_failing_size_bounds_longer_batches_and_not_shorter_ones() -> None:
    limits = MicroBatchLimits().after_out_of_memory(LENGTH, failing=8, next_size=4)

    assert [limits.bound(length) for length in (20, 100, 1000)] == [UNBOUND, 4, 4]


def test_a_size_that_fitted_is_preferred_to_a_smaller_next_size() -> None:
    limits = MicroBatchLimits().after_success(LENGTH, largest=6)

    limits = limits.after_out_of_memory(LENGTH, failing=8, next_size=4)

    assert limits.bound(LENGTH) == 6


@pytest.mark.parametrize(("fitted_length", "bound"), [(20, 4), (1000, 6)])
def test_a_size_that_fitted_longer_batches_is_preferred_but_not_one_that_fitted_shorter_ones(
    fitted_length: int, bound: int
) -> None:
    limits = MicroBatchLimits().after_success(fitted_length, largest=6)

    limits = limits.after_out_of_memory(LENGTH, failing=8, next_size=4)

    assert limits.bound(LENGTH) == bound


def test_a_smaller_size_that_fits_later_does_not_replace_a_larger_one_that_fitted() -> None:
    limits = MicroBatchLimits().after_success(LENGTH, largest=6).after_success(LENGTH, largest=3)

    limits = limits.after_out_of_memory(LENGTH, failing=8, next_size=4)

    assert limits.bound(LENGTH) == 6


def test_a_failure_at_a_longer_length_leaves_what_fitted_shorter_batches() -> None:
    limits = MicroBatchLimits().after_success(20, largest=6)

    limits = limits.after_out_of_memory(LENGTH, failing=4, next_size=2)
    limits = limits.after_out_of_memory(20, failing=8, next_size=3)

    assert [limits.bound(length) for length in (20, LENGTH)] == [6, 2]


def test_a_size_that_fitted_once_and_fails_now_is_no_longer_proven() -> None:
    limits = MicroBatchLimits().after_success(LENGTH, largest=6)

    limits = limits.after_out_of_memory(LENGTH, failing=6, next_size=3)
    limits = limits.after_out_of_memory(LENGTH, failing=5, next_size=3)

    assert limits.bound(LENGTH) == 4  # each failure lowers the proven size of 6 by one


def test_no_size_is_proven_at_lengths_at_which_a_single_sample_fails() -> None:
    limits = MicroBatchLimits(proven={6: 4, 7: 2, 8: 1})

    limits = limits.after_out_of_memory(LENGTH, failing=1, next_size=1)

    assert limits.proven == {6: 4}
    assert limits.bound(LENGTH) == 1


def grown(limits: MicroBatchLimits, fits: int, windows: int) -> tuple[MicroBatchLimits, list[int]]:
    """Run windows; return the limits, and the sizes that ran out of memory."""
    failed = []
    for _ in range(windows):
        size = limits.bound(LENGTH)
        if size > fits:
            failed.append(size)
            limits = limits.after_out_of_memory(LENGTH, size, -(-size // 2))
        else:
            limits = limits.after_success(LENGTH, largest=size)
    return limits, failed


def test_a_size_grows_only_after_as_many_windows_as_before() -> None:
    limits = MicroBatchLimits().after_out_of_memory(LENGTH, failing=32, next_size=4)

    bounds = []
    for windows in (GROW_AFTER - 1, 1, GROW_AFTER - 1, 1):
        limits, _ = grown(limits, fits=31, windows=windows)
        bounds.append(limits.bound(LENGTH))

    assert bounds == [4, 18, 18, 25]


def test_growth_at_one_length_leaves_the_bound_of_longer_batches_and_a_higher_one_of_shorter() -> (
    None
):
    limits = MicroBatchLimits().after_out_of_memory(1000, failing=4, next_size=2)
    limits = limits.after_out_of_memory(LENGTH, failing=8, next_size=4)
    limits = limits.after_out_of_memory(20, failing=20, next_size=10)

    limits, _ = grown(limits, fits=7, windows=GROW_AFTER)

    assert [limits.bound(length) for length in (20, LENGTH, 1000)] == [10, 6, 2]


def test_sizes_grow_to_the_largest_that_fits_and_no_failing_size_is_tried_twice() -> None:
    limits = MicroBatchLimits().after_out_of_memory(LENGTH, failing=32, next_size=4)

    limits, failed = grown(limits, fits=11, windows=20 * GROW_AFTER)

    assert limits.bound(LENGTH) == 11
    assert len(failed) == len(set(failed))
    assert all(11 < size < 32 for size in failed)
    assert grown(limits, fits=11, windows=10 * GROW_AFTER)[1] == []


def test_after_a_change_failing_sizes_are_tried_again() -> None:
    limits = MicroBatchLimits().after_out_of_memory(LENGTH, failing=5, next_size=4)
    assert grown(limits, fits=100, windows=5 * GROW_AFTER)[0].bound(LENGTH) == 4

    limits, _ = grown(limits.invalidated(), fits=100, windows=GROW_AFTER)

    assert limits.bound(LENGTH) == 8


def test_micro_batches_below_the_bound_do_not_raise_it() -> None:
    limits = MicroBatchLimits().after_out_of_memory(LENGTH, failing=8, next_size=4)

    for _ in range(3 * GROW_AFTER):
        limits = limits.after_success(LENGTH, largest=2)

    assert limits.bound(LENGTH) == 4


def test_the_rank_that_needs_the_most_micro_batches_decides() -> None:
    planner = MicroBatchPlanner()
    local_batches = LocalBatches(samples=[15, 1], micro_batch_samples=[8, 2], length=LENGTH)
    assert planner.micro_batches(local_batches) == 2

    planner.on_out_of_memory(local_batches, failing=8, next_size=4)

    assert planner.micro_batches(local_batches) == 4
    assert local_batches.largest(4) == [4, 1]


def test_the_guard_is_armed_at_first_and_disarmed_after_three_clean_windows() -> None:
    planner = MicroBatchPlanner()
    local_batches = LocalBatches(samples=[8], micro_batch_samples=[8], length=LENGTH)

    armed = []
    for _ in range(CLEAN_WINDOWS + 2):
        armed.append(planner.begin_window(local_batches, guard_requested=False))
        planner.on_success(local_batches, 1)

    assert armed == [True] * CLEAN_WINDOWS + [False, False]


def batches(length: int = LENGTH) -> LocalBatches:
    """Return a batch of 8 samples on one rank."""
    return LocalBatches(samples=[8], micro_batch_samples=[8], length=length)


def guarded(planner: MicroBatchPlanner, windows: int = 1, length: int = LENGTH) -> list[bool]:
    """Run windows that fit; return which of them were guarded."""
    armed = []
    for _ in range(windows):
        armed.append(planner.begin_window(batches(length), guard_requested=False))
        planner.on_success(batches(length), planner.micro_batches(batches(length)))
    return armed


def test_a_rank_that_asks_for_the_guard_gets_it_for_some_windows() -> None:
    planner = MicroBatchPlanner()
    guarded(planner, CLEAN_WINDOWS)

    assert not planner.begin_window(batches(), guard_requested=False)
    assert planner.begin_window(batches(), guard_requested=True)
    assert guarded(planner, CLEAN_WINDOWS + 1) == [True] * CLEAN_WINDOWS + [False]


def test_lengths_at_which_a_size_failed_stay_guarded_and_shorter_ones_only_for_some_windows() -> (
    None
):
    planner = MicroBatchPlanner()
    guarded(planner, CLEAN_WINDOWS)

    planner.on_out_of_memory(batches(), failing=8, next_size=4)

    windows = CLEAN_WINDOWS + 1
    assert guarded(planner, windows, length=20) == [True] * CLEAN_WINDOWS + [False]
    assert guarded(planner, windows) == [True] * windows


def test_a_change_in_memory_use_and_a_size_that_grew_are_guarded() -> None:
    planner = MicroBatchPlanner()
    planner.on_out_of_memory(batches(), failing=8, next_size=4)
    guarded(planner, CLEAN_WINDOWS)

    planner.invalidate()  # the sizes that failed are forgotten, and the bound is kept
    armed = guarded(planner, GROW_AFTER + 1)

    assert armed == [True] * CLEAN_WINDOWS + [False] * (GROW_AFTER - CLEAN_WINDOWS) + [True]


def disarmed() -> GuardSchedule:
    return GuardSchedule(windows_left=0, longest=LENGTH)


def test_a_longer_batch_a_request_or_a_change_arms_the_guard_again() -> None:
    assert not disarmed().next_window(longest=LENGTH, requested=False).is_armed
    assert disarmed().next_window(longest=LENGTH + 1, requested=False).is_armed
    assert disarmed().next_window(longest=LENGTH, requested=True).is_armed
    assert disarmed().after_change().is_armed


def test_larger_micro_batches_arm_the_guard_and_smaller_ones_do_not() -> None:
    planner = MicroBatchPlanner()
    for wanted, expected in ((4, True), (2, False), (8, True)):
        planner.guard_schedule = disarmed() if planner.guard_schedule.longest else GuardSchedule()

        local_batches = LocalBatches(samples=[8], micro_batch_samples=[wanted], length=1)
        assert planner.begin_window(local_batches, guard_requested=False) == expected
        planner.on_success(local_batches, 8)


@pytest.mark.parametrize(
    ("headroom", "limit", "expected"),
    [
        (None, 10 * GIB, False),
        (0.5 * GIB, None, False),
        (0.5 * GIB, 10 * GIB, True),
        (1.0 * GIB, 10 * GIB, False),
        (0.79 * GIB, 10 * GIB, True),
        (0.81 * GIB, 10 * GIB, False),
        (0.5 * GIB, 0.0, False),
    ],
)
def test_a_rank_requests_the_guard_where_its_headroom_is_low(
    headroom: float | None, limit: float | None, expected: bool
) -> None:
    assert needs_guard(headroom_bytes=headroom, limit_bytes=limit) == expected


def sizes(samples: list[int], micro_batch_samples: list[int], length: int = LENGTH) -> LocalBatches:
    return LocalBatches(samples=samples, micro_batch_samples=micro_batch_samples, length=length)


@pytest.mark.parametrize(
    ("samples", "wanted", "count"),
    [([12, 7], [5, 4], 3), ([12, 7], [6, 2], 4), ([1, 1], [8, 8], 1)],
)
def test_every_rank_runs_as_many_micro_batches_as_the_rank_that_needs_the_most(
    samples: list[int], wanted: list[int], count: int
) -> None:
    assert MicroBatchPlanner().micro_batches(sizes(samples, wanted)) == count


def test_the_largest_micro_batch_of_any_rank_is_proven_by_a_window() -> None:
    planner = MicroBatchPlanner()

    planner.on_success(sizes([12, 7], [8, 8]), 2)

    assert planner.limits == MicroBatchLimits(proven={7: 6})


def test_a_failure_is_recorded_at_its_length_and_keeps_the_smallest_failing_size() -> None:
    limits = MicroBatchLimits().after_out_of_memory(100, 11, 8).after_out_of_memory(100, 13, 9)

    assert limits == MicroBatchLimits(bounds={7: 9}, failing={7: 11}, clean={7: 0})


def test_without_a_failing_size_a_bound_doubles_after_twenty_windows() -> None:
    limits = MicroBatchLimits(bounds={7: 5})
    bounds = []

    for _ in range(20):
        limits = limits.after_success(100, limits.bound(100))
        bounds.append(limits.bound(100))

    assert bounds == [5] * 19 + [10]
    assert limits.clean == {7: 0}


def test_a_bound_grows_to_the_middle_between_it_and_the_smallest_failing_size() -> None:
    limits = MicroBatchLimits(bounds={7: 5}, failing={6: 14, 7: 12}, clean={7: 19})

    assert limits.after_success(100, 5).bounds == {7: 8}


@pytest.mark.parametrize(("length", "bucket"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_a_bucket_ends_with_a_power_of_two(length: int, bucket: int) -> None:
    assert length_bucket(length) == bucket


@pytest.mark.parametrize(
    ("limit_bytes", "largest"),
    [(30 / 0.95, 10), (31.9 / 0.95, 10), (9 / 0.95, 0), (11.9 / 0.95, 0)],
)
def test_the_largest_fitting_size_is_a_whole_number_of_samples(
    limit_bytes: float, largest: int
) -> None:
    assert largest_fitting(line([2, 4]), limit_bytes + 1e-9) == largest


def test_sizes_at_the_least_and_below() -> None:
    assert [smaller_size(failing, line([2, 4]), 9.0) for failing in (0, 1, 2)] == [None, None, 1]


def test_the_guard_is_armed_for_three_windows() -> None:
    schedule = GuardSchedule()
    left = []

    for _ in range(4):
        schedule = schedule.after_success(longest=7)
        left.append(schedule.windows_left)

    assert left == [2, 1, 0, 0]
    assert schedule == GuardSchedule(windows_left=0, longest=7)
    assert schedule.next_window(longest=7, requested=False) is schedule
    assert schedule.next_window(longest=8, requested=False).windows_left == 3


def test_the_history_keeps_the_last_200_peaks() -> None:
    history = history_of(*(recorded((4, 1), peak=float(peak)) for peak in range(230)))

    peaks = history.measured().peaks
    assert (len(peaks), peaks[0].peak_bytes, peaks[-1].peak_bytes) == (200, 30.0, 229.0)


def test_the_history_of_another_device_is_empty() -> None:
    record = recorded((4, 1))
    record.memory_bytes = {"cuda:1": record.memory_bytes["cuda:0"]}

    assert history_of(record).measured() == NOTHING
    assert not history_of(record).is_low
