"""Tests of the options that are read from a ds config: keys, old keys, defaults and limits."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from zerowatch.errors import DsConfigError
from zerowatch.runtime.estimator.config_reader import ConfigReader
from zerowatch.runtime.estimator.ds_options import DsOptions, accumulation_steps, read_options


def changed(config: dict[str, Any], stage: int) -> dict[str, Any]:
    """Return the options that differ from those of an empty configuration."""
    base = asdict(read_options({}, stage=stage))
    found = asdict(read_options(config, stage=stage))
    return {k: v for k, v in found.items() if v != base[k] and k != "set_keys"}


def test_the_defaults_are_those_of_deepspeed() -> None:
    assert read_options({}, stage=0) == DsOptions(stage=0)
    assert read_options({}, stage=2) == DsOptions(stage=2)
    assert read_options({}, stage=3) == DsOptions(stage=3, overlap_comm=True)


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"contiguous_gradients": False}, {"contiguous_gradients": False}),
        ({"reduce_scatter": False}, {"reduce_scatter": False}),
        (
            {"use_multi_rank_bucket_allreduce": False},
            {"use_multi_rank_bucket_allreduce": False},
        ),
        ({"overlap_comm": True}, {"overlap_comm": True}),
        ({"compute_grad_norm": False}, {"compute_grad_norm": False}),
        ({"round_robin_gradients": True}, {"round_robin_gradients": True}),
        ({"parameter_alignment": True}, {"parameter_alignment": True}),
        ({"reduce_bucket_size": 5e6}, {"reduce_bucket_size": 5_000_000}),
        ({"cpu_offload": True}, {"offload_optimizer": "cpu"}),
        # NVMe requires stage 3. So does the ratio, which `estimate_step` checks.
        ({"offload_optimizer": {"device": "NVMe"}}, {"offload_optimizer": "cpu"}),
        (
            {"offload_optimizer": {"device": "cpu", "ratio": 0.25}},
            {"offload_optimizer": "cpu", "offload_optimizer_ratio": 0.25},
        ),
        (
            {"offload_optimizer": {"device": "cpu", "pin_memory": False}},
            {"offload_optimizer": "cpu", "pin_optimizer": False},
        ),
        ({"cpu_offload": True, "offload_optimizer": {"device": "none"}}, {}),
        ({"stage3_max_live_parameters": 7}, {}),
        ({"offload_param": {"device": "cpu"}}, {}),
    ],
)
def test_each_key_of_stage_2_has_its_option(zero: dict[str, Any], expected: dict[str, Any]) -> None:
    assert changed({"zero_optimization": zero}, 2) == expected


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"stage3_prefetch_bucket_size": 11}, {"prefetch_bucket_size": 11}),
        ({"prefetch_bucket_size": 11}, {"prefetch_bucket_size": 11}),
        ({"stage3_param_persistence_threshold": 12}, {"param_persistence_threshold": 12}),
        ({"stage3_model_persistence_threshold": 13}, {"model_persistence_threshold": 13}),
        ({"stage3_max_live_parameters": 14}, {"max_live_parameters": 14}),
        ({"max_reuse_distance": 15}, {"max_reuse_distance": 15}),
        ({"sub_group_size": 16}, {"sub_group_size": 16}),
        ({"zero_hpz_partition_size": 4}, {"hpz_partition_size": 4}),
        ({"zero_hpz_partition_size": 0}, {}),
        (
            {"stage3_allgather_sequential": True, "stage3_prefetch_bucket_size": 11},
            {"allgather_sequential": True, "prefetch_bucket_size": 1},
        ),
        ({"stage3_use_all_reduce_for_fetch_params": True}, {"use_all_reduce_for_fetch": True}),
        ({"memory_efficient_linear": False}, {"memory_efficient_linear": False}),
        (
            {"offload_optimizer": {"device": "NVMe", "ratio": 0.25, "buffer_count": 7}},
            {
                "offload_optimizer": "nvme",
                "offload_optimizer_ratio": 0.25,
                "offload_optimizer_buffers": 7,
            },
        ),
        (
            {
                "offload_param": {
                    "device": "nvme",
                    "buffer_count": 3,
                    "buffer_size": 1e6,
                    "max_in_cpu": 0,
                }
            },
            {
                "offload_param": "nvme",
                "offload_param_buffers": 3,
                "offload_param_buffer_size": 1_000_000,
                "offload_param_max_in_cpu": 0,
            },
        ),
        ({"cpu_offload_param": True}, {"offload_param": "cpu"}),
        (
            {"offload_param": {"device": "cpu", "pin_memory": False}},
            {"offload_param": "cpu", "pin_param": False},
        ),
        ({"overlap_comm": False}, {"overlap_comm": False}),
    ],
)
def test_each_key_of_stage_3_has_its_option(zero: dict[str, Any], expected: dict[str, Any]) -> None:
    assert changed({"zero_optimization": zero}, 3) == expected


BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}
IN_BF16 = {
    "model_dtype": "bf16",
    "accumulation_dtype": "bf16",
    "communication_dtype": "bf16",
}
IN_FP16 = dict.fromkeys(IN_BF16, "fp16")


@pytest.mark.parametrize(
    ("config", "stage", "expected"),
    [
        (BF16, 2, IN_BF16 | {"checks_overflow": True}),
        ({"bfloat16": {"enabled": True}}, 2, IN_BF16 | {"checks_overflow": True}),
        (BF16, 3, IN_BF16),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, 2, IN_BF16),
        (FP16, 3, IN_FP16 | {"checks_overflow": True}),
        ({"data_types": {"grad_accum_dtype": "float16"}}, 1, {"accumulation_dtype": "fp16"}),
        ({"communication_data_type": "torch.bfloat16"}, 1, {"communication_dtype": "bf16"}),
        ({"gradient_clipping": 0.5}, 1, {"gradient_clipping": 0.5}),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, 1, {"low_precision_master": True}),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, 1, {"low_precision_master": True}),
        ({"bf16": {"bf16_optimizer_states": True}}, 1, {"low_precision_states": True}),
        ({"optimizer": {"type": "AdamW"}}, 1, {"optimizer": "adamw"}),
        (
            {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}, "legacy_fusion": True}},
            1,
            {"optimizer": "sgd", "optimizer_momentum": True, "legacy_fusion": True},
        ),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0}}}, 1, {"optimizer": "sgd"}),
        # DeepSpeed checkpoints nothing by itself.
        ({"activation_checkpointing": {"partition_activations": False}}, 1, {}),
        ({"managed_gradient_accumulation": False}, 1, {"managed_accumulation": False}),
    ],
)
def test_each_key_of_the_rest_has_its_option(
    config: dict[str, Any], stage: int, expected: dict[str, Any]
) -> None:
    assert changed(config, stage) == expected


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"expert_parallel": {"enabled": True}}, "expert parallelism"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast"),
        ({"compile": {"deepcompile": True}}, "DeepCompile"),
        ({"hybrid_engine": {"enabled": True}}, "the hybrid engine"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "ZenFlow"),
        ({"zero_optimization": {"offload_optimizer": {"super_offload": True}}}, "SuperOffload"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "quantized weights (qwZ)"),
        (
            {"zero_optimization": {"zero_quantized_nontrainable_weights": True}},
            "quantized frozen weights",
        ),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "quantized gradients (qgZ)"),
        (
            {
                "zero_optimization": {
                    "stage3_module_granularity_threshold": 5,
                    "leaf_module": {"a": 1},
                }
            },
            "ZeRO-3 leaf modules",
        ),
        ({"optimizer": {"type": "Muon"}}, "the Muon optimizer"),
        ({"sequence_parallel_size": 2}, "sequence parallelism"),
        ({"sequence_parallel_size": 1, "torch_autocast": {"enabled": False}}, None),
        ({"zero_optimization": {"stage3_module_granularity_threshold": 0}}, None),
    ],
)
def test_features_that_are_not_modeled_are_named_once(
    config: dict[str, Any], name: str | None
) -> None:
    assert read_options(config, stage=2).unmodeled == (() if name is None else (name,))


@pytest.mark.parametrize(
    ("stage", "overlaps", "in_order"), [(1, False, False), (1, True, True), (2, False, True)]
)
def test_gradients_are_reduced_in_the_order_of_backward_from_stage_2_on_or_with_overlap(
    stage: int, overlaps: bool, in_order: bool
) -> None:
    options = DsOptions(stage=stage, overlap_comm=overlaps)

    assert options.reduces_in_backward_order == in_order


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"stage": 2}, False),
        ({"model_dtype": "fp16"}, False),
        ({"accumulation_dtype": "bf16"}, False),
        ({"offload_optimizer": "cpu"}, False),
        ({"stage": 0}, False),
        ({"stage": 0, "is_pipeline": True, "accumulation_dtype": "bf16"}, True),
        ({"stage": 0, "is_pipeline": True, "model_dtype": None}, False),
        ({"is_pipeline": True, "accumulation_dtype": "bf16"}, False),
    ],
)
def test_the_optimizer_of_bf16_runs_at_stage_1_with_fp32_sums_and_in_pipelines_without_zero(
    changes: dict[str, Any], expected: bool
) -> None:
    fields = {"stage": 1, "model_dtype": "bf16", "accumulation_dtype": "fp32"}

    assert DsOptions(**(fields | changes)).uses_bf16_optimizer == expected


def test_an_option_of_another_stage_is_read_at_that_stage() -> None:
    config = {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 7}}

    assert read_options(config).stage == 3
    assert read_options(config, stage=1).stage == 1
    assert read_options(config).set_keys == {"stage", "stage3_max_live_parameters"}
    assert read_options({"zero_optimization": True}).stage == 1
    assert read_options({"zero_optimization": False}).stage == 0


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (2.0**63, None),
        (2.0**64, "give a whole number of 1 or more, at most 2^63"),
        (1, None),
        (0, "give a whole number of 1 or more"),
        (1.5, "give a whole number of 1 or more"),
        (None, None),
    ],
)
def test_a_size_is_a_whole_number_within_its_limits(value: object, problem: str | None) -> None:
    reader = ConfigReader({"a": value}, "ds.json")

    if problem is None:
        assert reader.size("a", 7, minimum=1) == (7 if value is None else value)
    else:
        with pytest.raises(DsConfigError, match=problem.replace("^", r"\^")):
            reader.size("a", 7, minimum=1)


@pytest.mark.parametrize(
    ("value", "maximum", "problem"),
    [
        (0, 1.0, None),
        (1.0, 1.0, None),
        (1.01, 1.0, "ds.json: b.a is 1.01; give a number from 0 to 1"),
        (-0.1, float("inf"), "ds.json: b.a is -0.1; give a number of 0 or more"),
        ("x", 1.0, "ds.json: b.a is 'x'; give a number"),
        ("auto", 1.0, None),
    ],
)
def test_a_number_is_within_its_limits(value: object, maximum: float, problem: str | None) -> None:
    reader = ConfigReader({"b": {"a": value}}, "ds.json").section("b")

    if problem is None:
        expected = 0.5 if value == "auto" else value
        assert reader.number("a", 0.5, maximum=maximum) == expected
    else:
        with pytest.raises(DsConfigError) as raised:
            reader.number("a", 0.5, maximum=maximum)
        assert str(raised.value) == problem


@pytest.mark.parametrize(("value", "expected"), [(1, True), (0, False), (None, True)])
def test_a_flag_may_be_a_number(value: object, expected: bool) -> None:
    assert ConfigReader({"a": value}, "ds.json").flag("a", True) is expected


def test_values_that_are_auto_are_named_once_with_the_options_that_give_them() -> None:
    reader = ConfigReader({"z": {"a": "auto"}, "b": "auto"}, "ds.json")
    reader.section("z").number("a", 1)
    reader.section("z").size("a", 1)
    reader.flag("b")

    with pytest.raises(DsConfigError, match=r"^ds\.json: .*give a value here for z\.a, b, or the"):
        reader.raise_for_auto()


@pytest.mark.parametrize(
    ("sizes", "ranks", "steps"),
    [
        ({"train_batch_size": 60, "train_micro_batch_size_per_gpu": 5}, 4, 3),
        ({"train_batch_size": 60, "gradient_accumulation_steps": 5}, 4, 5),
        (
            {
                "train_batch_size": 60,
                "train_micro_batch_size_per_gpu": 5,
                "gradient_accumulation_steps": 3,
            },
            4,
            3,
        ),
        (
            {
                "train_batch_size": 60,
                "train_micro_batch_size_per_gpu": 5,
                "gradient_accumulation_steps": "auto",
            },
            4,
            3,
        ),
        ({"train_batch_size": 4}, 4, 1),
        # The ranks of a sequence-parallel group share their samples.
        (
            {
                "train_batch_size": 4,
                "train_micro_batch_size_per_gpu": 1,
                "sequence_parallel_size": 2,
            },
            2,
            4,
        ),
        (
            {
                "train_batch_size": 8,
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 4,
                "sequence_parallel_size": 2,
            },
            4,
            4,
        ),
        ({"train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 7}, 4, 7),
    ],
)
def test_the_micro_batches_of_a_step_follow_from_the_other_sizes(
    sizes: dict[str, Any], ranks: int, steps: int
) -> None:
    assert accumulation_steps(sizes, ranks) == steps


@pytest.mark.parametrize(
    ("sizes", "numbers"),
    [
        (
            {
                "train_batch_size": 61,
                "train_micro_batch_size_per_gpu": 5,
                "gradient_accumulation_steps": 3,
            },
            "61 is not train_micro_batch_size_per_gpu 5 x gradient_accumulation_steps 3 x "
            "4 data-parallel ranks = 60; change",
        ),
        (
            {"train_batch_size": 62},
            "train_batch_size 62 is not a multiple of 4 data-parallel ranks; change",
        ),
        (
            {"train_batch_size": 3, "train_micro_batch_size_per_gpu": 5},
            "3 is not a multiple of train_micro_batch_size_per_gpu 5 x 4 data-parallel ranks = 20",
        ),
        (
            {"train_batch_size": 60, "train_micro_batch_size_per_gpu": 8},
            "60 is not a multiple of train_micro_batch_size_per_gpu 8 x 4 data-parallel ranks = 32",
        ),
        (
            {"train_batch_size": 20, "gradient_accumulation_steps": 3},
            "20 is not a multiple of gradient_accumulation_steps 3 x 4 data-parallel ranks = 12",
        ),
        (
            {"train_micro_batch_size_per_gpu": 5, "sequence_parallel_size": 3},
            "sequence_parallel_size is 3, which does not divide 4 data-parallel ranks",
        ),
    ],
)
def test_sizes_that_contradict_each_other_are_named_with_their_values(
    sizes: dict[str, Any], numbers: str
) -> None:
    with pytest.raises(DsConfigError, match=numbers):
        accumulation_steps(sizes, 4)
