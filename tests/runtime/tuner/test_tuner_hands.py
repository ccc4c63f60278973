"""What hands are made of: sizes to try, room in memory, plans that are known, garbage."""

from __future__ import annotations

import gc

import pytest

from zerowatch.errors import ZerowatchError
from zerowatch.runtime.trainer.oom_recovery.sizing import (
    UNBOUND,
    BatchShares,
    MemoryMeasurements,
    MicroBatchPlanner,
    PeakSample,
)
from zerowatch.runtime.tuner.knobs.candidate_sizes import micro_batch_sizes, powers_of_two
from zerowatch.runtime.tuner.knobs.deepspeed_knobs import configured, with_knob
from zerowatch.runtime.tuner.knobs.gc_knob import GcKnob
from zerowatch.runtime.tuner.knobs.memory_check import exceeds_fit, exceeds_free, exceeds_host
from zerowatch.runtime.tuner.knobs.plan_cache import PlanCache

ONE = {"reduce_bucket_size": 100, "micro_batch_samples": 4}
OTHER = {"reduce_bucket_size": 200, "micro_batch_samples": 4}


@pytest.fixture
def garbage():
    hand = GcKnob()
    yield hand
    hand.close()
    assert gc.isenabled()


def peaks_of(*pairs: tuple[int, float], limit: float | None = 1000.0) -> MemoryMeasurements:
    peaks = [PeakSample(samples=samples, length=6, peak_bytes=used) for samples, used in pairs]
    return MemoryMeasurements(peaks=peaks, limit_bytes=limit)


def test_sizes_are_powers_of_two_up_to_the_whole_with_the_present_one():
    assert powers_of_two(1000, 300) == (16, 32, 64, 128, 256, 300, 512, 1024)
    assert powers_of_two(4, 500, with_zero=True) == (0, 1, 2, 4, 500)


@pytest.mark.parametrize(
    ("share", "now", "sizes"),
    [
        (8, 2, (1, 2, 4, 8)),
        (7, 2, (1, 2, 4, 7)),
        (8, 3, (1, 2, 3, 4, 8)),
        (8, 64, (1, 2, 4, 8, 64)),
        (0, 5, (5,)),
        (1, 1, (1,)),
    ],
)
def test_micro_batches_cut_the_largest_share(share, now, sizes):
    assert micro_batch_sizes(share, now) == sizes


def test_what_needs_more_than_is_free_is_refused():
    known = peaks_of((2, 700.0))

    assert exceeds_free(known, extra_bytes=200, length=6) is None
    assert "220 B are free" in (exceeds_free(known, extra_bytes=300, length=6) or "")
    assert exceeds_free(known, extra_bytes=-5, length=6) is None


@pytest.mark.parametrize("knob", ["optimizer_sleep", "offload_optimizer", "offload_param"])
def test_nothing_moves_to_a_host_that_is_short_of_memory_itself(knob):
    here, there = {knob: False}, {knob: True}

    assert "at a risk of 80%" in (exceeds_host(here, there, host_risk=0.8) or "")
    assert exceeds_host(here, there, host_risk=0.1) is None
    assert exceeds_host(there, there, host_risk=0.8) is None
    assert exceeds_host(there, here, host_risk=0.8) is None


def test_where_no_limit_is_known_nothing_is_refused():
    known = peaks_of((2, 700.0), (4, 900.0), limit=None)

    assert exceeds_free(known, extra_bytes=10**9, length=6) is None
    assert exceeds_fit(known, samples=99, extra_bytes=0, length=6, bound=UNBOUND) is None


def test_a_line_through_two_sizes_says_how_many_samples_fit():
    known = peaks_of((2, 400.0), (4, 600.0))

    assert exceeds_fit(known, samples=7, extra_bytes=0, length=6, bound=UNBOUND) is None
    assert "7 would fit" in (
        exceeds_fit(known, samples=8, extra_bytes=0, length=6, bound=UNBOUND) or ""
    )
    assert exceeds_fit(known, samples=7, extra_bytes=100, length=6, bound=UNBOUND) is not None


def test_one_size_draws_no_line_and_lengths_are_kept_apart():
    assert exceeds_fit(peaks_of((2, 900.0)), samples=8, extra_bytes=0, length=6, bound=99) is None
    assert exceeds_free(peaks_of((2, 990.0)), extra_bytes=50, length=600) is None


def test_a_size_that_ran_out_is_refused():
    assert exceeds_fit(peaks_of(), samples=4, extra_bytes=0, length=6, bound=3) == (
        "micro-batches of more than 3 ran out of memory before"
    )


def a_plan_at_rest() -> MicroBatchPlanner:
    planner = MicroBatchPlanner()
    share = BatchShares(samples=[4], wanted=[4], length=6)
    for _ in range(4):
        planner.begin_window(share, guard_requested=False)
        planner.on_success(share, 1)
    return planner


def test_a_configuration_that_is_new_arms_the_guard():
    planner = a_plan_at_rest()

    PlanCache(lambda: planner).move(ONE, OTHER)

    assert planner.guard_schedule.is_armed


def test_going_back_to_a_configuration_brings_its_plan_back():
    planner = a_plan_at_rest()
    known = PlanCache(lambda: planner)
    rested = planner.limits, planner.guard_schedule

    known.move(ONE, OTHER)
    known.move(OTHER, ONE)

    assert (planner.limits, planner.guard_schedule) == rested


def test_what_changes_nothing_about_memory_leaves_the_plan_alone():
    planner = a_plan_at_rest()

    PlanCache(lambda: planner).move(ONE, {**ONE, "micro_batch_samples": 1})

    assert not planner.guard_schedule.is_armed


def test_an_undo_brings_back_what_was_known():
    planner = a_plan_at_rest()
    rested = planner.limits, planner.guard_schedule

    PlanCache(lambda: planner).move(ONE, OTHER)()

    assert (planner.limits, planner.guard_schedule) == rested


def test_garbage_is_left_to_us_and_back(garbage):
    undo = garbage.turn("between_steps")

    assert (gc.isenabled(), gc.get_freeze_count() > 0) == (False, True)
    assert garbage.get() == "between_steps"
    garbage.window_ended()
    undo()
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)
    assert garbage.get() == "automatic"


def test_what_a_script_froze_stays_frozen(garbage):
    gc.freeze()
    try:
        garbage.turn("between_steps")()

        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_garbage_that_a_script_collects_itself_is_no_knob(garbage):
    gc.disable()
    try:
        assert garbage.unsupported_reason() == "the script has switched it off"
    finally:
        gc.enable()


def test_a_value_that_is_none_is_refused(garbage):
    with pytest.raises(ZerowatchError, match="python_gc"):
        garbage.turn("never")


def test_a_live_knob_stands_in_the_ds_config_where_a_rebuild_finds_it():
    config = {"zero_optimization": {"stage": 3, "prefetch_bucket_size": 7}}

    there = with_knob(config, "prefetch_bucket_size", 9)
    timed = with_knob(there, "timers.throughput.synchronized", False)

    assert there == {"zero_optimization": {"stage": 3, "prefetch_bucket_size": 9}}
    assert timed["timers"] == {"throughput": {"synchronized": False}}
    assert configured("prefetch_bucket_size", timed) == 9
    assert config["zero_optimization"]["prefetch_bucket_size"] == 7


def test_a_knob_that_the_ds_config_did_not_name_is_taken_out_of_it_again():
    config = {"zero_optimization": {"stage": 2}}
    there = with_knob(config, "reduce_bucket_size", 9)

    assert with_knob(there, "reduce_bucket_size", None) == config
    assert configured("reduce_bucket_size", config) is None
