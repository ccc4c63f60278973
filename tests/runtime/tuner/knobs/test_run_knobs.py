"""Knobs of a run write the ds config without changing what the user has given, without DeepSpeed.

`test_knobs_job.py` sets all knobs of real runs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from scripts.trainer.resume_engine import SingleRankHostGroup

from zerowatch.runtime.common.undo import Undo
from zerowatch.runtime.trainer.oom_recovery.micro_batch_planner import (
    GuardSchedule,
    MemoryMeasurements,
    MicroBatchPlanner,
    PeakSample,
)
from zerowatch.runtime.tuner.knobs import run_knobs
from zerowatch.runtime.tuner.knobs.engine_knobs import DeepSpeedKnob
from zerowatch.runtime.tuner.knobs.run_knobs import RunKnobs


class Size:
    """A live setting of an engine, which is an attribute of its name."""

    minimum = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def unsupported_reason(self, engine: Any) -> None:
        return None

    def get(self, engine: Any) -> int:
        value: int = getattr(engine, self.name)
        return value

    def apply(self, engine: Any, value: int) -> Undo:
        before = self.get(engine)
        setattr(engine, self.name, value)
        return lambda: setattr(engine, self.name, before)


class Holder:
    """Holds an engine with two sizes, which DeepSpeed reads from the ds config."""

    compressor = None

    def __init__(self, zero: dict[str, Any]) -> None:
        self.on_engine_replaced: list[Any] = []
        self.rebuild(zero)

    def rebuild(self, zero: dict[str, Any]) -> None:
        self.config = {"zero_optimization": zero}
        self.engine = SimpleNamespace(
            config=dict(self.config),
            reduce_bucket_size=int(zero.get("reduce_bucket_size", 500)),
            prefetch_bucket_size=int(zero.get("stage3_prefetch_bucket_size", 50)),
        )
        for notify in self.on_engine_replaced:
            notify()


def knobs_of(holder: Any, monkeypatch: pytest.MonkeyPatch) -> RunKnobs:
    """Return the knobs of the two sizes; the run has no other."""
    live = [DeepSpeedKnob(Size(name), holder) for name in SIZES]  # type: ignore[arg-type]
    layouts = SimpleNamespace(changed_config=lambda target: None, on_engine_replaced=lambda: None)
    none = SimpleNamespace(name="none", get=lambda: None, unsupported_reason=lambda: "none here")
    for name, value in {
        "deepspeed_knobs": lambda source: live,
        "data_knobs": lambda runner, data: [none],
        "attachment_knobs": lambda source, modules: [],
        "layout_knobs": lambda layouts: [],
        "ZeroLayouts": lambda *args, **options: layouts,
        "CompressionKnob": lambda *args: none,
        "AsyncReductionKnob": lambda *args: none,
    }.items():
        monkeypatch.setattr(run_knobs, name, value)
    planner = SimpleNamespace(
        limits=None, guard_schedule=None, configuration=0, invalidate=lambda: None
    )
    runner: Any = SimpleNamespace(
        activation_checkpointing=None, replay=SimpleNamespace(planner=planner)
    )
    group: Any = SimpleNamespace(world_size=2)
    return RunKnobs(holder, runner, group)


SIZES = ("reduce_bucket_size", "prefetch_bucket_size")


@pytest.mark.parametrize("size", [20, 2e1, "20"])
def test_a_change_keeps_what_a_rebuild_of_the_user_has_set(
    monkeypatch: pytest.MonkeyPatch, size: Any
) -> None:
    holder = Holder({"stage": 3, "reduce_bucket_size": 40})
    knobs = knobs_of(holder, monkeypatch)
    holder.rebuild({"stage": 3, "reduce_bucket_size": size})

    knobs.apply({**knobs.values(), "prefetch_bucket_size": 7})

    zero = {"stage": 3, "reduce_bucket_size": size, "stage3_prefetch_bucket_size": 7}
    assert holder.config == holder.engine.config == {"zero_optimization": zero}


def test_all_ranks_note_whether_reduction_overlaps_right_before_a_rebuild(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[Any] = []
    holder: Any = Holder({"stage": 2})
    vars(holder).update(
        attached=lambda change: None,
        reload_optimizer_states=lambda: None,
        rebuild_as=log.append,
    )
    knobs: Any = knobs_of(holder, monkeypatch)
    knobs._host_group = SingleRankHostGroup()
    knobs._layouts.changed_config = lambda target: {"stage": 1}
    knobs._layouts.note_overlap = lambda: log.append("noted")

    knobs.apply(knobs.values())

    assert log == ["noted", {"stage": 1}]


@pytest.mark.parametrize("by_undo", [False, True])
def test_a_change_that_is_taken_back_leaves_the_config_of_the_rebuild(
    monkeypatch: pytest.MonkeyPatch, by_undo: bool
) -> None:
    holder = Holder({"stage": 3, "reduce_bucket_size": 40})
    knobs = knobs_of(holder, monkeypatch)
    holder.rebuild({"stage": 3, "reduce_bucket_size": 2e1})
    before = dict(knobs.values())

    undo = knobs.apply({**before, "reduce_bucket_size": 10})
    if by_undo:
        undo()
    else:
        knobs.apply(before)

    assert dict(knobs.values()) == before
    assert holder.config == {"zero_optimization": {"stage": 3, "reduce_bucket_size": 2e1}}


def test_a_change_on_trial_is_not_refused_for_its_own_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peaks of the change contain what it needs: 600 and 690 bytes, 90 more."""
    holder = Holder({"stage": 2, "reduce_bucket_size": 500})
    knobs: Any = knobs_of(holder, monkeypatch)
    runner = knobs._window_runner
    runner.replay.planner = planner = MicroBatchPlanner()
    planner.guard_schedule = GuardSchedule(longest=6)
    knobs._plan_cache = run_knobs.PlanCache(runner.replay)
    knobs._layouts.changed_config = lambda target: None
    measured: list[PeakSample] = []
    runner.peak_history = SimpleNamespace(
        measured=lambda: MemoryMeasurements(peaks=measured, limit_bytes=760.0)
    )
    runner.micro_batch_samples = 4
    runner.opened = SimpleNamespace(local_batches=SimpleNamespace(samples=[8, 8]))
    base = dict(knobs.values())
    knobs._knobs.memory_bytes = lambda target: 90 * (target != base and knobs.values() == base)
    other = {**base, "reduce_bucket_size": 20}

    refusals = []
    for target in (other, base) * 3:
        peak = 600.0 if knobs.values() == base else 690.0
        number = planner.configuration
        measured.append(PeakSample(samples=4, length=6, peak_bytes=peak, configuration=number))
        refusals.append(knobs.unsupported_reason(target))
        knobs.apply(target)

    assert refusals == [None] * 6
    runner.peak_history.measured = lambda: MemoryMeasurements(peaks=measured, limit_bytes=740.0)
    assert knobs.unsupported_reason(other) == "90 B more needed, 80.8 B free"
