"""Tests of how names of DeepSpeed are looked up, by classes that stand for DeepSpeed's.

`test_drift.py` looks up each listed name in the installed DeepSpeed.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace

import deepspeed
import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from zerowatch.runtime.common.deepspeed_internals import (
    attribute,
    class_path,
    clear_release_cache,
    missing_for_rebuild,
    missing_names,
    missing_reason,
    release_cache,
    training_run_refusal,
    unknown_subclass_reason,
)

PATH = "some.module:Owner"


class Owner:
    __private = 1
    _own = 2


class Plain:
    pass


class Stage2Subclass(DeepSpeedZeroOptimizer):
    pass


class Stage3Subclass(DeepSpeedZeroOptimizer_Stage3):
    pass


def test_a_private_name_is_mangled_as_python_mangles_it() -> None:
    assert attribute(PATH, "__private") == "_Owner__private"
    assert attribute(PATH, "_own") == "_own"


def test_a_class_is_spelled_with_its_module() -> None:
    assert class_path(Owner()) == f"{__name__}:Owner"


def test_the_names_that_an_object_lacks_are_listed_in_order() -> None:
    names = ["gone", "_own", "__private", "__gone"]

    assert missing_names(Owner(), PATH, names) == ["gone", "__gone"]


def test_the_first_missing_name_is_the_reason_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)

    reasons = [missing_reason(Owner(), PATH, "_own", "gone_one", "gone_two") for _ in range(2)]

    assert reasons == ["this DeepSpeed has no Owner.gone_one"] * 2
    assert len(caplog.messages) == 1
    assert missing_reason(Owner(), PATH, "_own", "__private") is None


@pytest.mark.parametrize(
    ("kind", "is_unknown"),
    [
        (Plain, False),
        (DeepSpeedZeroOptimizer, False),
        (DeepSpeedZeroOptimizer_Stage3, False),
        (Stage2Subclass, True),
        (Stage3Subclass, True),
    ],
)
def test_only_a_subclass_of_zero_s_optimizers_is_unknown(kind: type, is_unknown: bool) -> None:
    reason = unknown_subclass_reason(kind.__new__(kind))

    expected = f"{kind.__name__} overrides methods of ZeRO's own optimizer" if is_unknown else None
    assert reason == expected


def test_a_training_run_needs_an_engine_that_leaves_the_end_of_a_window_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = training_run_refusal()
    monkeypatch.delattr(DeepSpeedEngine, "managed_gradient_accumulation")

    refusal = training_run_refusal()

    assert before is None
    assert refusal is not None
    assert refusal.startswith(
        f"TrainingRun needs DeepSpeed 0.19.4 or newer, got {deepspeed.__version__}, "
    )


def test_names_for_a_rebuild_are_looked_up_in_the_engine_its_optimizer_and_modules() -> None:
    class DeepSpeedEngine:  # has none of the names but its optimizer
        optimizer = SimpleNamespace()

    class FP16_UnfusedOptimizer:
        fp16_groups = 1

    engine = DeepSpeedEngine()
    engine.optimizer = FP16_UnfusedOptimizer()  # type: ignore[assignment]

    missing = list(missing_for_rebuild(engine))

    start = "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer"
    of_optimizer = [name for name in missing if name.startswith(start)]
    of_engine = [name for name in missing if ":DeepSpeedEngine " in name]
    assert of_optimizer == [f"{start} fp32_groups", f"{start} loss_scale_config"]
    assert "deepspeed.runtime.engine:DeepSpeedEngine destroy" in of_engine
    assert missing == of_engine + of_optimizer  # DeepSpeed's own modules have all names


def test_the_cache_of_released_parameters_is_found_and_cleared() -> None:
    cached = release_cache()
    assert cached is not None
    cleared = []

    class Cache:
        def cache_clear(self) -> None:
            cleared.append(1)

    from deepspeed.runtime.zero import partitioned_param_coordinator as module

    name = "_PartitionedParameterCoordinator__params_to_release"
    owner = module.PartitionedParameterCoordinator
    before = vars(owner)[name]
    try:
        setattr(owner, name, Cache())
        clear_release_cache()
        delattr(owner, name)
        without = release_cache()
        clear_release_cache()
    finally:
        setattr(owner, name, before)

    assert cleared == [1]
    assert without is None
