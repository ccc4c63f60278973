"""Tests of live settings: each is set at window 3 and undone at window 5, on 2 and 4 ranks.

Covers `live_setting.py`, `prefetch_settings.py` and `zero_optimizer.py`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chosen_cases import chosen, tiers
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from scripts.engine.live_settings_cases import CASES, ON_FOUR_RANKS, Case
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

from zerowatch.errors import ZerowatchError
from zerowatch.runtime.common.undo import set_attributes
from zerowatch.runtime.engine.live_settings import (
    all_settings,
    bucket_settings,
    optimizer_state_offload,
)
from zerowatch.runtime.engine.live_settings.all_settings import (
    TIMER_SYNCHRONIZED_SETTING,
    MinimalBuckets,
)
from zerowatch.runtime.engine.live_settings.bucket_settings import REDUCE_BUCKET_SIZE_SETTING
from zerowatch.runtime.engine.live_settings.optimizer_state_offload import OptimizerStateOffload

# Over more than two ranks these change the order of sums; the others are bitwise neutral.
REORDER_SUMS = {
    "reduce_bucket_size",
    "reduce_scatter",
    "use_multi_rank_bucket_allreduce",
    "contiguous_gradients",
}


def results_of(ranks: int, folder, names: Iterable[str]) -> list[dict[str, Any]]:
    script = SCRIPTS / "engine" / "live_settings_job.py"
    finished = start_ranks(ranks, script, folder, *dict.fromkeys(names), cwd=folder)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def two_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    names = [*(case.name for case in chosen(request, "case")), *chosen(request, "name")]
    return results_of(2, tmp_path_factory.mktemp("two"), names)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    names = [case.name for case in ON_FOUR_RANKS]
    return results_of(4, tmp_path_factory.mktemp("four"), names)


# Each setting once, and each stage.
QUICK = (
    "stage 0, reduce_bucket_size 500",
    "stage 1, contiguous_gradients False",
    "stage 1, use_multi_rank_bucket_allreduce False",
    "stage 2, overlap_comm True",
    "stage 2, timers.throughput.synchronized False",
    "stage 3, reduce_scatter False",
    "stage 3, prefetch_bucket_size 0",
    "stage 3, max_live_parameters 0",
    "stage 3, max_reuse_distance 0",
    "stage 3, param_persistence_threshold 100000",
)
each_case = pytest.mark.parametrize(
    "case",
    tiers(CASES, quick=[case for case in CASES if case.name in QUICK]),
    ids=lambda case: case.name,
)


@pytest.mark.jobs
@each_case
def test_on_two_ranks_weights_are_bitwise_unchanged(two_ranks, case: Case):
    assert [rank[case.name]["bitwise"] for rank in two_ranks] == [True, True]


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.parametrize("case", ON_FOUR_RANKS, ids=lambda case: case.name)
def test_on_four_ranks_weights_are_bitwise_equal_unless_the_setting_reorders_sums(
    four_ranks, case: Case
):
    for rank in four_ranks:
        assert rank[case.name]["difference"] <= 1e-6
        assert rank[case.name]["bitwise"] or case.setting in REORDER_SUMS


@pytest.mark.jobs
@each_case
def test_calls_of_a_window_change_with_the_setting_and_return_with_its_undo(two_ranks, case: Case):
    for rank in two_ranks:
        found = rank[case.name]
        for what, direction in case.shows:
            before, turned, undone = (
                found[which].get(what, 0) for which in ("untouched", "turned", "undone")
            )
            assert (turned > before) if direction > 0 else (turned < before), what
            assert undone == before, what


@pytest.mark.jobs
@each_case
def test_the_set_value_and_the_restored_value_read_back(two_ranks, case: Case):
    for rank in two_ranks:
        assert rank[case.name]["holds_after_apply"]
        assert rank[case.name]["holds_after_undo"]


@pytest.mark.jobs
@pytest.mark.parametrize(
    "name",
    tiers(
        [f"stage 3, param_persistence_threshold {value}" for value in (0, 10**5)],
        quick=["stage 3, param_persistence_threshold 100000"],
    ),
)
def test_persistent_parameters_take_the_predicted_bytes(two_ranks, name: str):
    found = two_ranks[0][name]

    kept = found["turned"]["kept_bytes"] - found["untouched"]["kept_bytes"]

    assert found["memory_bytes"] == kept


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("name", "bytes_more"),
    tiers(
        [
            ("stage 1, reduce_bucket_size 500", -4 * 4500),
            ("stage 2, overlap_comm True", 4 * 5000),
            ("stage 3, reduce_bucket_size 900", -4 * 4100),
            ("stage 3, contiguous_gradients False", -4 * 5000),
        ],
        quick=[("stage 2, overlap_comm True", 4 * 5000)],
    ),
)
def test_a_buffer_takes_the_bytes_of_its_elements(two_ranks, name: str, bytes_more: int):
    assert two_ranks[0][name]["memory_bytes"] == bytes_more


@pytest.mark.jobs
def test_an_unsupported_setting_has_a_reason(two_ranks):
    reasons = two_ranks[0]["reasons"]

    assert "stage 3" in reasons["stage 0"]["prefetch_bucket_size"]
    assert "step()" in reasons["stage 1"]["overlap_comm"]
    assert "no streams" in reasons["stage 3"]["overlap_comm"]
    for case in CASES:
        assert reasons[f"stage {case.stage}"][case.setting] is None


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        (REDUCE_BUCKET_SIZE_SETTING, 0),
        (REDUCE_BUCKET_SIZE_SETTING, True),
        (REDUCE_BUCKET_SIZE_SETTING, 1.5),
        (TIMER_SYNCHRONIZED_SETTING, 1),
    ],
)
def test_an_invalid_value_is_refused_before_anything_changes(setting, value):
    engine = an_engine()

    with pytest.raises(ZerowatchError, match=setting.name):
        setting.apply(engine, value)

    assert engine.tput_timer.config.synchronized is True


def test_a_name_missing_from_deepspeed_disables_its_setting_and_is_logged(caplog):
    engine = an_engine()
    del engine.tput_timer

    assert "tput_timer" in (TIMER_SYNCHRONIZED_SETTING.unsupported_reason(engine) or "")
    assert TIMER_SYNCHRONIZED_SETTING.is_applied(engine, True) is False
    assert "DeepSpeedEngine.tput_timer" in caplog.text
    with pytest.raises(ZerowatchError, match="tput_timer"):
        TIMER_SYNCHRONIZED_SETTING.apply(engine, False)


@pytest.mark.parametrize(
    "place",
    [
        "deepspeed.runtime.superoffload.superoffload_stage3:SuperOffloadOptimizer_Stage3",
        "deepspeed.runtime.zenflow.zenflow_stage_1_and_2:ZenFlowZeroOptimizer",
    ],
)
def test_an_optimizer_that_overrides_zero_s_own_has_none_of_its_settings(place: str) -> None:
    module, _, name = place.partition(":")
    kind = getattr(importlib.import_module(module), name)
    engine = an_engine()
    engine.optimizer = kind.__new__(kind)  # its constructor needs a GPU

    reasons = {
        setting.name: setting.unsupported_reason(engine) for setting in all_settings.LIVE_SETTINGS
    }

    assert reasons.pop(TIMER_SYNCHRONIZED_SETTING.name) is None
    assert set(reasons.values()) == {f"{name} overrides methods of ZeRO's own optimizer"}


def overriding_optimizer() -> Any:
    kind = type("Custom", (DeepSpeedZeroOptimizer_Stage3,), {})
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"zero_offload_optimizer": lambda: SimpleNamespace(device="none")}, None),
        ({"zero_offload_optimizer": lambda: SimpleNamespace(device="nvme")}, "NVMe already"),
        ({"pipeline_parallelism": True}, "train_batch"),
        ({"optimizer": None}, "no optimizer with states"),
        ({"basic_optimizer": object()}, "no optimizer with states"),
        ({"optimizer": overriding_optimizer()}, "Custom overrides methods of ZeRO's own optimizer"),
    ],
)
def test_states_are_offloaded_only_where_they_are_on_a_device_between_updates(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str | None
) -> None:
    gpu = SimpleNamespace(device_name=lambda: "cuda")
    monkeypatch.setattr(optimizer_state_offload, "get_accelerator", lambda: gpu)
    engine = an_engine()
    engine.optimizer = object()
    engine.basic_optimizer = SimpleNamespace(state={})
    engine.zero_offload_optimizer = lambda: None
    vars(engine).update(changes)

    found = OptimizerStateOffload().unsupported_reason(engine)

    assert found is None if reason is None else reason in (found or "")


def an_engine() -> SimpleNamespace:
    return SimpleNamespace(
        optimizer=None,
        allreduce_gradients=lambda: None,
        tput_timer=SimpleNamespace(config=SimpleNamespace(synchronized=True)),
    )


def test_minimal_buckets_that_fail_half_way_leave_no_size_changed(monkeypatch):
    class Engine:
        first = 10

    class First:
        def apply(self, engine, minimum):
            return set_attributes(engine, first=minimum)

    class Second:
        def apply(self, engine, minimum):
            raise MemoryError

    engine, lower = Engine(), [(First(), 1), (Second(), 1)]
    monkeypatch.setattr(all_settings, "_to_lower", lambda engine: lower)

    with pytest.raises(MemoryError):
        MinimalBuckets().attach(engine)

    assert engine.first == 10


def test_a_bucket_that_memory_does_not_suffice_for_leaves_the_old_buffers(monkeypatch):
    bucket = SimpleNamespace(buffer=torch.empty(4))
    zero_3 = SimpleNamespace(ipg_buckets={torch.float32: bucket}, contiguous_gradients=True)
    empty = torch.empty

    def limited(elements, **options):
        if elements > 4:
            raise torch.OutOfMemoryError("no memory")
        return empty(elements, **options)

    monkeypatch.setattr(torch, "empty", limited)

    with pytest.raises(torch.OutOfMemoryError):
        bucket_settings._resize_buffers(zero_3, 8)

    assert bucket.buffer.numel() == 4
