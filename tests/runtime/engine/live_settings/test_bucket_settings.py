"""Tests of the buffers of gradients and parameters, on ZeRO optimizers that were never started.

Covers `all_settings.py`, `bucket_settings.py` and `prefetch_settings.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from zerowatch.errors import ZerowatchError
from zerowatch.runtime.engine.live_settings import bucket_settings, prefetch_settings
from zerowatch.runtime.engine.live_settings.all_settings import (
    TIMER_SYNCHRONIZED_SETTING,
    MinimalBuckets,
)
from zerowatch.runtime.engine.live_settings.bucket_settings import (
    CONTIGUOUS_GRADIENTS_SETTING,
    MULTI_RANK_BUCKET_ALLREDUCE_SETTING,
    OVERLAP_COMM_SETTING,
    REDUCE_BUCKET_SIZE_SETTING,
    REDUCE_SCATTER_SETTING,
)
from zerowatch.runtime.engine.live_settings.prefetch_settings import (
    MAX_LIVE_PARAMETERS_SETTING,
    MAX_REUSE_DISTANCE_SETTING,
    PARAM_PERSISTENCE_THRESHOLD_SETTING,
    PREFETCH_BUCKET_SIZE_SETTING,
)

COORDINATOR = "_PartitionedParameterCoordinator__"


class Owner(SimpleNamespace):
    """An object with attributes, which can be referred to weakly."""


class PlainEngine(Owner):
    """An engine of stage 0 on a model of 7 x 5 and 7 parameters; it notes its bucket sizes."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer=optimizer, module=nn.Linear(5, 7), sizes=[])
        self.tput_timer = SimpleNamespace(config=Owner(synchronized=True))

    def allreduce_gradients(self, bucket_size: int = 500) -> None:
        """Note the size."""
        self.sizes.append(bucket_size)

    def managed_gradient_accumulation(self) -> bool:
        """The engine counts micro-batches."""
        return True

    def zero_offload_param(self) -> None:
        """Parameters are on the device."""


def zero_2(**changes: Any) -> PlainEngine:
    """An engine of stage 2 with buckets of 1000 elements of two dtypes, reduced in fp32."""
    optimizer = DeepSpeedZeroOptimizer.__new__(DeepSpeedZeroOptimizer)
    fields = {
        "reduce_bucket_size": 1000,
        "ipg_buckets": {torch.float32: Owner(buffer=None), torch.bfloat16: Owner(buffer=None)},
        "_gradient_reduction_buffer_dtype": lambda: torch.float32,
        "_release_ipg_buffers": lambda: None,
        "_grad_acc_hooks": ["hook"],
        "contiguous_gradients": True,
        "overlap_comm": False,
        "reduce_scatter": True,
        "use_multi_rank_bucket_allreduce": True,
        "partition_gradients": True,
        "gradient_predivide_factor": 1.0,
        "postscale_gradients": True,
        "cpu_offload": False,
    }
    vars(optimizer).update(fields | changes)
    return PlainEngine(optimizer)


def zero_3(**changes: Any) -> PlainEngine:
    """An engine of stage 3 with buffers of 1000 elements of fp32 and bf16."""
    optimizer = DeepSpeedZeroOptimizer_Stage3.__new__(DeepSpeedZeroOptimizer_Stage3)
    buckets = {
        dtype: Owner(buffer=torch.empty(1000, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    }
    coordinator = Owner()
    for name, value in (
        ("prefetch_bucket_sz", 30),
        ("max_n_available_params", 300),
        ("max_reuse_dist_in_numel", 200),
        ("params_to_release", None),
        ("allgather_stream", None),
    ):
        setattr(coordinator, COORDINATOR + name, value)
    engine = PlainEngine(optimizer)
    weight, bias = engine.module.parameters()
    weight.ds_persist, bias.ds_persist = False, True

    def mark(threshold: int, budget: int) -> list[Any]:
        kept = [each for each in (weight, bias) if each.numel() <= threshold]
        for each in kept:
            each.ds_persist = True
        return kept

    offload = Owner(
        param_coordinator=coordinator,
        mark_persistent_parameters=mark,
        persistent_parameters=[bias],
        param_numel_persistence_threshold=10,
        model_persistence_threshold=40,
    )
    fields = {
        "reduce_bucket_size": 1000,
        "ipg_buckets": buckets,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "gradient_predivide_factor": 1.0,
        "postscale_gradients": True,
        "use_muon": False,
        "all2all_process_group": None,
        "parameter_offload": offload,
        "persistent_parameters": [bias],
    }
    vars(optimizer).update(fields | changes)
    return engine


@pytest.fixture(autouse=True)
def cleared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count how often DeepSpeed's cache of the parameters to release is cleared."""
    times: list[str] = []
    monkeypatch.setattr(prefetch_settings, "clear_release_cache", lambda: times.append("cleared"))
    return times


def sizes_of(engine: PlainEngine) -> list[int | None]:
    buffers = [bucket.buffer for bucket in engine.optimizer.ipg_buckets.values()]
    return [None if buffer is None else buffer.numel() for buffer in buffers]


@pytest.mark.parametrize(
    ("engine", "value", "bytes_more"),
    [
        (zero_2(), 1300, 300 * (4 + 4)),  # both buckets are reduced in fp32
        (zero_2(), 700, -300 * (4 + 4)),
        (zero_2(overlap_comm=True), 1300, 300 * (4 + 4) * 2),  # two buffers take turns
        (zero_2(contiguous_gradients=False), 1300, None),
        (zero_3(), 1300, 300 * (4 + 2)),
        (PlainEngine(), 30, (30 - 42) * 4),  # of the 42 elements that the model has
        (PlainEngine(), 100, 0),
    ],
)
def test_a_bucket_of_another_size_takes_this_many_bytes_more(
    engine: PlainEngine, value: int, bytes_more: int | None
) -> None:
    assert REDUCE_BUCKET_SIZE_SETTING.memory_bytes(engine, value) == bytes_more


def test_the_buffers_of_stage_3_have_the_size_of_the_bucket_until_the_undo() -> None:
    engine = zero_3()

    undo = REDUCE_BUCKET_SIZE_SETTING.apply(engine, 1300)
    resized, value = sizes_of(engine), REDUCE_BUCKET_SIZE_SETTING.get(engine)
    applied = [REDUCE_BUCKET_SIZE_SETTING.is_applied(engine, size) for size in (1000, 1300)]
    undo()

    assert (resized, value, applied) == ([1300, 1300], 1300, [False, True])
    assert (sizes_of(engine), REDUCE_BUCKET_SIZE_SETTING.get(engine)) == ([1000, 1000], 1000)


def test_a_buffer_of_another_size_is_not_the_setting() -> None:
    engine = zero_3()
    engine.optimizer.ipg_buckets[torch.bfloat16].buffer = torch.empty(999)
    with_wrong_buffer = REDUCE_BUCKET_SIZE_SETTING.is_applied(engine, 1000)
    engine.optimizer.ipg_buckets[torch.bfloat16].buffer = None
    without_buffer = REDUCE_BUCKET_SIZE_SETTING.is_applied(engine, 1000)
    engine.optimizer.contiguous_gradients = False

    assert (with_wrong_buffer, without_buffer) == (False, False)
    assert REDUCE_BUCKET_SIZE_SETTING.is_applied(engine, 1000)


def test_the_size_of_stage_0_is_passed_with_each_call_unless_the_caller_gives_one() -> None:
    engine = PlainEngine()

    before = REDUCE_BUCKET_SIZE_SETTING.get(engine)
    undo = REDUCE_BUCKET_SIZE_SETTING.apply(engine, 30)
    during = REDUCE_BUCKET_SIZE_SETTING.get(engine)
    engine.allreduce_gradients()
    engine.allreduce_gradients(40)
    engine.allreduce_gradients(bucket_size=50)
    undo()
    engine.allreduce_gradients()

    assert (before, during) == (500_000_000, 30)
    assert engine.sizes == [30, 40, 50, 500]
    assert REDUCE_BUCKET_SIZE_SETTING.get(engine) == 500_000_000


def test_the_last_size_of_stage_0_counts() -> None:
    engine = PlainEngine()

    REDUCE_BUCKET_SIZE_SETTING.apply(engine, 30)
    undo = REDUCE_BUCKET_SIZE_SETTING.apply(engine, 20)
    nested = REDUCE_BUCKET_SIZE_SETTING.get(engine)
    undo()

    assert (nested, REDUCE_BUCKET_SIZE_SETTING.get(engine)) == (20, 30)


def test_a_pipeline_passes_its_own_size() -> None:
    engine = PlainEngine()
    engine.pipeline_parallelism = True

    reason = REDUCE_BUCKET_SIZE_SETTING.unsupported_reason(engine)

    assert reason == "a pipeline engine passes its own bucket size with each call"


@pytest.mark.parametrize(
    ("engine", "part"),
    [
        (zero_2(), None),
        (zero_3(), None),
        (PlainEngine(), "reduces whole gradients at once"),
        (zero_2(gradient_predivide_factor=2.0), "gradient_predivide_factor"),
        (zero_2(postscale_gradients=False), "prescale_gradients"),
        (zero_2(ipg_buckets={torch.float64: None}), "reduced as torch.float64"),
        (zero_2(contiguous_gradients=False), None),
        (zero_3(contiguous_gradients=False), "always scatters"),
        (zero_3(use_muon=True), "Muon"),
        (zero_3(all2all_process_group=object()), "quantized"),
    ],
)
def test_reduce_scatter_has_the_conditions_of_deepspeed(
    engine: PlainEngine, part: str | None
) -> None:
    reason = REDUCE_SCATTER_SETTING.unsupported_reason(engine)

    assert reason is None if part is None else part in (reason or "")


@pytest.mark.parametrize(
    ("setting", "engine", "part"),
    [
        (MULTI_RANK_BUCKET_ALLREDUCE_SETTING, zero_2(), None),
        (MULTI_RANK_BUCKET_ALLREDUCE_SETTING, zero_2(reduce_scatter=False), "everything"),
        (MULTI_RANK_BUCKET_ALLREDUCE_SETTING, zero_3(), "only stages 1 and 2"),
        (CONTIGUOUS_GRADIENTS_SETTING, zero_2(), None),
        (CONTIGUOUS_GRADIENTS_SETTING, zero_3(), None),
        (CONTIGUOUS_GRADIENTS_SETTING, PlainEngine(), "whole gradients"),
        (CONTIGUOUS_GRADIENTS_SETTING, zero_2(cpu_offload=True), "on the host"),
        (CONTIGUOUS_GRADIENTS_SETTING, zero_2(_grad_acc_hooks=[]), "without the gradient hooks"),
        (OVERLAP_COMM_SETTING, zero_2(), None),
        (OVERLAP_COMM_SETTING, zero_2(_grad_acc_hooks=[]), "without the gradient hooks"),
        (OVERLAP_COMM_SETTING, PlainEngine(), "whole gradients"),
        (OVERLAP_COMM_SETTING, zero_3(), "no streams"),
        (PREFETCH_BUCKET_SIZE_SETTING, zero_3(), None),
        (PREFETCH_BUCKET_SIZE_SETTING, zero_2(), "only stage 3"),
        (PARAM_PERSISTENCE_THRESHOLD_SETTING, zero_3(), None),
        (PARAM_PERSISTENCE_THRESHOLD_SETTING, zero_2(), "only stage 3"),
    ],
)
def test_a_setting_that_an_engine_lacks_has_a_reason(
    setting: Any, engine: PlainEngine, part: str | None
) -> None:
    reason = setting.unsupported_reason(engine)

    assert reason is None if part is None else part in (reason or "")


@pytest.mark.parametrize(
    ("partitions", "managed", "supported"),
    [(True, False, True), (False, True, True), (False, False, False)],
)
def test_stage_1_overlaps_unless_the_script_accumulates_by_itself(
    partitions: bool, managed: bool, supported: bool
) -> None:
    engine = zero_2(partition_gradients=partitions)
    engine.managed_gradient_accumulation = lambda: managed  # type: ignore[method-assign]

    assert (OVERLAP_COMM_SETTING.unsupported_reason(engine) is None) is supported


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        (REDUCE_SCATTER_SETTING, "reduce_scatter"),
        (MULTI_RANK_BUCKET_ALLREDUCE_SETTING, "use_multi_rank_bucket_allreduce"),
        (CONTIGUOUS_GRADIENTS_SETTING, "contiguous_gradients"),
    ],
)
def test_a_switch_of_stage_2_is_an_attribute_until_the_undo(setting: Any, name: str) -> None:
    engine = zero_2()

    undo = setting.apply(engine, False)
    off = (getattr(engine.optimizer, name), setting.get(engine))
    undo()

    assert (off, getattr(engine.optimizer, name)) == ((False, False), True)


def test_overlap_of_stage_2_is_an_attribute_until_the_undo() -> None:
    engine = zero_2()

    undo = OVERLAP_COMM_SETTING.apply(engine, True)
    on = OVERLAP_COMM_SETTING.is_applied(engine, True)
    undo()

    assert (on, OVERLAP_COMM_SETTING.get(engine)) == (True, False)


@pytest.mark.parametrize(
    ("engine", "value", "bytes_more"),
    [
        (zero_2(), True, 1000 * (4 + 4)),
        (zero_2(overlap_comm=True), False, -1000 * (4 + 4)),
        (zero_2(), False, 0),
        (zero_2(contiguous_gradients=False), True, None),
    ],
)
def test_overlap_takes_a_second_buffer(
    engine: PlainEngine, value: bool, bytes_more: int | None
) -> None:
    assert OVERLAP_COMM_SETTING.memory_bytes(engine, value) == bytes_more


@pytest.mark.parametrize(
    ("engine", "value", "bytes_more"),
    [
        (zero_3(), False, -1000 * (4 + 2)),
        (zero_3(contiguous_gradients=False), True, 1000 * (4 + 2)),
        (zero_3(), True, 0),
        (zero_2(), False, None),
    ],
)
def test_contiguous_gradients_take_a_buffer_of_each_dtype(
    engine: PlainEngine, value: bool, bytes_more: int | None
) -> None:
    assert CONTIGUOUS_GRADIENTS_SETTING.memory_bytes(engine, value) == bytes_more


def test_stage_3_has_no_buffers_without_contiguous_gradients() -> None:
    engine = zero_3()

    undo = CONTIGUOUS_GRADIENTS_SETTING.apply(engine, False)
    without = sizes_of(engine)
    applied = [CONTIGUOUS_GRADIENTS_SETTING.is_applied(engine, value) for value in (True, False)]
    undo()

    assert (without, applied) == ([None, None], [False, True])
    assert sizes_of(engine) == [1000, 1000]
    assert CONTIGUOUS_GRADIENTS_SETTING.is_applied(engine, True)


def test_contiguous_gradients_of_stage_3_that_fail_stay_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = zero_3(contiguous_gradients=False)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(bucket_settings, "_resize_buffers", fail)
    with pytest.raises(torch.OutOfMemoryError):
        CONTIGUOUS_GRADIENTS_SETTING.apply(engine, True)

    assert engine.optimizer.contiguous_gradients is False


@pytest.mark.parametrize(
    ("setting", "name", "before"),
    [
        (PREFETCH_BUCKET_SIZE_SETTING, "prefetch_bucket_sz", 30),
        (MAX_LIVE_PARAMETERS_SETTING, "max_n_available_params", 300),
        (MAX_REUSE_DISTANCE_SETTING, "max_reuse_dist_in_numel", 200),
    ],
)
def test_a_number_of_the_coordinator_is_set_until_the_undo(
    cleared: list[str], setting: Any, name: str, before: int
) -> None:
    engine = zero_3()
    coordinator = engine.optimizer.parameter_offload.param_coordinator

    undo = setting.apply(engine, 0)
    during, times = getattr(coordinator, COORDINATOR + name), len(cleared)
    undo()

    assert (during, setting.get(engine), times, len(cleared)) == (0, before, 1, 2)


@pytest.mark.parametrize(
    ("value", "bytes_more"), [(0, -30 * 4), (35, 5 * 4), (1000, (42 - 30) * 4)]
)
def test_at_most_the_whole_model_is_prefetched(value: int, bytes_more: int) -> None:
    assert PREFETCH_BUCKET_SIZE_SETTING.memory_bytes(zero_3(), value) == bytes_more


def test_the_bytes_of_other_numbers_of_the_coordinator_are_not_known() -> None:
    assert MAX_LIVE_PARAMETERS_SETTING.memory_bytes(zero_3(), 0) is None


@pytest.mark.parametrize(
    ("value", "bytes_more"),
    [(0, -7 * 4), (6, -7 * 4), (7, 0), (34, 0), (35, (35 - 7) * 4), (100, (35 - 7) * 4)],
)
def test_persistent_parameters_take_their_bytes_within_the_budget_of_the_model(
    value: int, bytes_more: int
) -> None:
    # The weight has 35 elements and comes first, the bias 7; together at most 40 may persist.
    assert PARAM_PERSISTENCE_THRESHOLD_SETTING.memory_bytes(zero_3(), value) == bytes_more


def test_the_threshold_marks_the_parameters_that_stay_whole_until_the_undo(
    cleared: list[str],
) -> None:
    engine = zero_3()
    weight, bias = engine.module.parameters()
    setting, optimizer = PARAM_PERSISTENCE_THRESHOLD_SETTING, engine.optimizer

    undo = setting.apply(engine, 0)
    during = (weight.ds_persist, bias.ds_persist, optimizer.persistent_parameters)
    kept, is_applied, times = (
        optimizer.parameter_offload.persistent_parameters,
        setting.is_applied(engine, 0),
        len(cleared),
    )
    undo()

    assert (during, kept, is_applied, times) == ((False, False, []), [], True, 1)
    assert (weight.ds_persist, bias.ds_persist) == (False, True)
    assert len(optimizer.persistent_parameters) == 1
    assert (setting.get(engine), setting.is_applied(engine, 10), len(cleared)) == (10, True, 2)


def test_a_parameter_that_is_marked_otherwise_is_not_the_setting() -> None:
    engine = zero_3()
    engine.module.weight.ds_persist = True

    assert not PARAM_PERSISTENCE_THRESHOLD_SETTING.is_applied(engine, 10)


def test_parameters_off_the_device_were_chosen_at_the_start() -> None:
    engine = zero_3()
    engine.zero_offload_param = lambda: object()  # type: ignore[method-assign,assignment,return-value]
    on_nvme = zero_3()
    on_nvme.module.weight.nvme_swapper = object()

    reason = PARAM_PERSISTENCE_THRESHOLD_SETTING.unsupported_reason(engine)

    assert reason == "parameters are offloaded; their persistent ones were chosen at the start"
    assert "on NVMe" in (PREFETCH_BUCKET_SIZE_SETTING.unsupported_reason(on_nvme) or "")


def test_minimal_buckets_hold_the_largest_gradient_and_prefetch_nothing() -> None:
    engine = zero_3()
    offload = engine.optimizer.parameter_offload
    coordinator = offload.param_coordinator

    undo = MinimalBuckets().attach(engine)
    numbers = [
        getattr(coordinator, COORDINATOR + name)
        for name in ("prefetch_bucket_sz", "max_n_available_params", "max_reuse_dist_in_numel")
    ]
    during = (sizes_of(engine), numbers, offload.param_numel_persistence_threshold)
    again = MinimalBuckets().unsupported_reason(engine)
    undo()

    assert during == ([35, 35], [0, 0, 0], 0)
    assert again == "each size is at its minimum already"
    assert (sizes_of(engine), offload.param_numel_persistence_threshold) == ([1000, 1000], 10)
    assert MinimalBuckets().unsupported_reason(engine) is None


MINIMAL = {
    "reduce_bucket_size": 35,
    "prefetch_bucket_size": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}


def test_the_config_of_an_engine_has_minimal_sizes_until_the_undo() -> None:
    engine = zero_3()
    given = {"zero_optimization": {"stage": 3, "prefetch_bucket_size": 30}}
    engine.config = given

    undo = MinimalBuckets().attach(engine)
    during = engine.config
    undo()

    assert during == {"zero_optimization": {"stage": 3, **MINIMAL}}
    assert engine.config is given
    assert given == {"zero_optimization": {"stage": 3, "prefetch_bucket_size": 30}}


def test_the_undo_of_minimal_sizes_keeps_other_entries_of_the_config() -> None:
    engine = zero_3()
    engine.config = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000}}
    undo = MinimalBuckets().attach(engine)
    zero = engine.config["zero_optimization"]

    engine.config = {"zero_optimization": {**zero, "reduce_scatter": False}}
    undo()

    assert engine.config == {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000, "reduce_scatter": False}
    }


def test_the_timer_stops_waiting_for_the_device_until_the_undo() -> None:
    engine = PlainEngine()

    undo = TIMER_SYNCHRONIZED_SETTING.apply(engine, False)
    off = TIMER_SYNCHRONIZED_SETTING.get(engine)
    undo()

    assert (off, TIMER_SYNCHRONIZED_SETTING.get(engine)) == (False, True)
    assert TIMER_SYNCHRONIZED_SETTING.memory_bytes(engine, False) == 0


def test_a_timer_without_the_setting_is_named() -> None:
    engine = PlainEngine()
    engine.tput_timer = SimpleNamespace()

    reason = TIMER_SYNCHRONIZED_SETTING.unsupported_reason(engine)

    assert reason == "this DeepSpeed's throughput timer has no setting"


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [
        (REDUCE_BUCKET_SIZE_SETTING, 0, "it is a whole number of elements, 1 or more"),
        (PREFETCH_BUCKET_SIZE_SETTING, -1, "it is a whole number of elements, 0 or more"),
        (REDUCE_SCATTER_SETTING, 1, "it is a switch, True or False"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_with_what_is(
    setting: Any, value: int, text: str
) -> None:
    with pytest.raises(ZerowatchError) as error:
        setting.apply(zero_3(), value)

    assert str(error.value) == f"{setting.name} cannot be set to {value!r}: {text}"
