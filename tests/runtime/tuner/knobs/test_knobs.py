"""Tests of parts of the knobs: candidate sizes, memory checks, cached plans, gc."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace

import pytest

from zerowatch.errors import ZerowatchError
from zerowatch.runtime.common.undo import FAILURES
from zerowatch.runtime.trainer.oom_recovery.micro_batch_planner import (
    UNBOUND,
    MemoryMeasurements,
    MicroBatchPlanner,
    PeakSample,
)
from zerowatch.runtime.trainer.window.window_agreement import LocalBatches
from zerowatch.runtime.tuner.knobs.data_knobs import MicroBatchKnob, micro_batch_sizes
from zerowatch.runtime.tuner.knobs.engine_knobs import (
    DeepSpeedKnob,
    GcKnob,
    powers_of_two,
)
from zerowatch.runtime.tuner.knobs.memory_check import exceeds_fit, exceeds_free, exceeds_host
from zerowatch.runtime.tuner.knobs.run_knobs import PlanCache

ONE = {"reduce_bucket_size": 100, "micro_batch_samples": 4}
OTHER = {"reduce_bucket_size": 200, "micro_batch_samples": 4}


@pytest.fixture
def gc_knob():
    knob = GcKnob()
    yield knob
    knob.close()
    assert gc.isenabled()


def peaks_of(*pairs: tuple[int, float], limit: float | None = 1000.0) -> MemoryMeasurements:
    peaks = [PeakSample(samples=samples, length=6, peak_bytes=used) for samples, used in pairs]
    return MemoryMeasurements(peaks=peaks, limit_bytes=limit)


def test_sizes_are_powers_of_two_up_to_the_total_and_the_one_in_use():
    assert powers_of_two(1000, 300) == (16, 32, 64, 128, 256, 300, 512, 1024)
    assert powers_of_two(4, 500, with_zero=True) == (0, 1, 2, 4, 500)


@pytest.mark.parametrize(
    ("local_batch", "now", "sizes"),
    [
        (8, 2, (1, 2, 4, 8)),
        (7, 2, (1, 2, 4, 7)),
        (8, 3, (1, 2, 3, 4, 8)),
        (8, 64, (1, 2, 4, 8, 64)),
        (0, 5, (5,)),
        (1, 1, (1,)),
    ],
)
def test_micro_batch_sizes_split_the_largest_local_batch(local_batch, now, sizes):
    assert micro_batch_sizes(local_batch, now) == sizes


def test_a_change_that_needs_more_than_is_free_is_refused():
    known = peaks_of((2, 700.0))

    assert exceeds_free(known, extra_bytes=200, length=6) is None
    assert "220 B free" in (exceeds_free(known, extra_bytes=300, length=6) or "")
    assert exceeds_free(known, extra_bytes=-5, length=6) is None


@pytest.mark.parametrize("knob", ["optimizer_state_offload", "offload_optimizer", "offload_param"])
def test_nothing_moves_to_a_host_that_is_short_of_memory(knob):
    here, there = {knob: False}, {knob: True}

    assert "80%" in (exceeds_host(here, there, host_risk=0.8) or "")
    assert exceeds_host(here, there, host_risk=0.1) is None
    assert exceeds_host(there, there, host_risk=0.8) is None
    assert exceeds_host(there, here, host_risk=0.8) is None


def test_without_a_known_limit_nothing_is_refused():
    known = peaks_of((2, 700.0), (4, 900.0), limit=None)

    assert exceeds_free(known, extra_bytes=10**9, length=6) is None
    assert exceeds_fit(known, samples=99, extra_bytes=0, length=6, bound=UNBOUND) is None


def test_peaks_of_two_sizes_give_the_samples_that_fit():
    known = peaks_of((2, 400.0), (4, 600.0))

    assert exceeds_fit(known, samples=7, extra_bytes=0, length=6, bound=UNBOUND) is None
    assert "7 fit" in (exceeds_fit(known, samples=8, extra_bytes=0, length=6, bound=UNBOUND) or "")
    assert exceeds_fit(known, samples=7, extra_bytes=100, length=6, bound=UNBOUND) is not None


def test_peaks_of_one_size_or_another_length_give_nothing():
    assert exceeds_fit(peaks_of((2, 900.0)), samples=8, extra_bytes=0, length=6, bound=99) is None
    assert exceeds_free(peaks_of((2, 990.0)), extra_bytes=50, length=600) is None


def test_a_size_that_ran_out_of_memory_is_refused():
    assert exceeds_fit(peaks_of(), samples=4, extra_bytes=0, length=6, bound=3) == (
        "micro-batches of more than 3 ran out of memory before"
    )


def unguarded_planner() -> MicroBatchPlanner:
    planner = MicroBatchPlanner()
    local_batches = LocalBatches(samples=[4], micro_batch_samples=[4], length=6)
    for _ in range(4):
        planner.begin_window(local_batches, guard_requested=False)
        planner.on_success(local_batches, 1)
    return planner


def test_a_new_configuration_is_guarded():
    planner = unguarded_planner()

    PlanCache(SimpleNamespace(planner=planner)).switch(ONE, OTHER)

    assert planner.guard_schedule.is_armed


def test_switching_back_restores_the_plan():
    planner = unguarded_planner()
    cache = PlanCache(SimpleNamespace(planner=planner))
    before = planner.limits, planner.guard_schedule

    cache.switch(ONE, OTHER)
    cache.switch(OTHER, ONE)

    assert (planner.limits, planner.guard_schedule) == before


def test_switching_back_restores_the_number_of_the_configuration():
    planner = MicroBatchPlanner()
    cache = PlanCache(SimpleNamespace(planner=planner))
    numbers = []
    for before, now in ((ONE, OTHER), (OTHER, ONE), (ONE, {**ONE, "micro_batch_samples": 1})):
        undo = cache.switch(before, now)
        numbers.append(planner.configuration)
    undo()

    assert numbers == [1, 0, 0]
    assert planner.configuration == 0


def test_a_memory_neutral_knob_keeps_the_plan():
    planner = unguarded_planner()

    PlanCache(SimpleNamespace(planner=planner)).switch(ONE, {**ONE, "micro_batch_samples": 1})

    assert not planner.guard_schedule.is_armed


def test_an_undo_restores_the_plan():
    planner = unguarded_planner()
    before = planner.limits, planner.guard_schedule

    PlanCache(SimpleNamespace(planner=planner)).switch(ONE, OTHER)()

    assert (planner.limits, planner.guard_schedule) == before


def test_collection_between_steps_can_be_undone(gc_knob):
    undo = gc_knob.set("between_steps")

    assert (gc.isenabled(), gc.get_freeze_count() > 0) == (False, True)
    assert gc_knob.get() == "between_steps"
    gc_knob.on_window_end()
    undo()
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)
    assert gc_knob.get() == "automatic"


def collects_after_fork() -> bool:
    child = os.fork()
    if child == 0:
        os._exit(int(gc.isenabled()))
    return bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_forked_processes_collect_automatically(gc_knob):
    gc_knob.set("between_steps")
    forked_meanwhile = collects_after_fork()
    here = gc.isenabled()
    gc_knob.set("automatic")
    gc.disable()  # by the script, which workers inherit
    try:
        forked_later = collects_after_fork()
    finally:
        gc.enable()

    assert (forked_meanwhile, here, forked_later) == (True, False, False)


def test_objects_that_a_script_froze_stay_frozen(gc_knob):
    gc.freeze()
    try:
        gc_knob.set("between_steps")()

        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_a_garbage_collector_that_the_script_disabled_cannot_be_tuned(gc_knob):
    gc.disable()
    try:
        assert gc_knob.unsupported_reason() is not None
    finally:
        gc.enable()


def test_an_unknown_value_is_refused(gc_knob):
    with pytest.raises(ZerowatchError, match="python_gc"):
        gc_knob.set("never")


@pytest.mark.parametrize("error", FAILURES)
def test_a_value_that_a_new_engine_does_not_take_is_logged_and_training_goes_on(caplog, error):
    def apply(engine: object, value: int):
        if engine == "new":
            raise error("no such buffer")
        return lambda: None

    setting = SimpleNamespace(
        name="reduce_bucket_size",
        get=lambda engine: 5,
        apply=apply,
        unsupported_reason=lambda engine: None,
    )
    source = SimpleNamespace(engine="old", config={"zero_optimization": {"reduce_bucket_size": 9}})
    knob = DeepSpeedKnob(setting, source)
    knob.set(9)
    source.engine = "new"

    knob.on_engine_replaced()

    assert "reduce_bucket_size is not 9 on the new engine: " in caplog.text


def test_micro_batch_sizes_that_differ_between_ranks_cannot_be_tuned() -> None:
    windows = SimpleNamespace(micro_batch_samples=4, opened=None)
    knob = MicroBatchKnob(windows)
    assert knob.unsupported_reason() is None

    windows.opened = SimpleNamespace(local_batches=SimpleNamespace(micro_batch_samples=[4, 4]))
    assert knob.unsupported_reason() is None
    windows.opened = SimpleNamespace(local_batches=SimpleNamespace(micro_batch_samples=[4, 2]))
    assert knob.unsupported_reason() is not None
