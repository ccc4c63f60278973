"""Tests of the estimate of a step, against closed forms and DeepSpeed's source.

Covers `config_reader.py` and `estimate_remarks.py`.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest

from zerowatch.errors import DsConfigError
from zerowatch.runtime.estimator.buckets import combine_messages, fill_buckets, flatten
from zerowatch.runtime.estimator.ds_options import DsOptions, accumulation_steps, read_options
from zerowatch.runtime.estimator.estimate_step import UnsupportedStageError, estimate_step
from zerowatch.runtime.estimator.model_shape import (
    ModelShape,
    ModuleShape,
    ParameterShape,
    Topology,
)
from zerowatch.runtime.estimator.stage_3_traffic import module_visits
from zerowatch.runtime.estimator.step_estimate import StepEstimate, reference_wire_bytes
from zerowatch.runtime.estimator.typical_model import typical_transformer
from zerowatch.runtime.estimator.zero3_coordinator import Zero3Coordinator

BF16 = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}


def chain(*numels: int, differentiable_inputs: bool = True) -> ModelShape:
    """Return a model of one parameter per layer."""
    layers = tuple(
        ModuleShape(name=str(n), parameters=(n,), differentiable_input=differentiable_inputs)
        for n in range(len(numels))
    )
    parameters = tuple(
        ParameterShape(name=f"{n}.weight", shape=(numel,)) for n, numel in enumerate(numels)
    )
    return ModelShape(parameters=parameters, root=ModuleShape(name="", children=layers))


def estimate(
    zero: dict, *, ranks: int = 8, accumulation: int = 1, **config: object
) -> StepEstimate:
    whole = {
        **BF16,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": zero,
        **config,
    }
    return estimate_step(chain(*[1600] * 6), whole, Topology(world_size=ranks))


def remarks(zero: dict, **config: object) -> str:
    return "\n".join(estimate(zero, **config).remarks)


@pytest.mark.parametrize(
    ("stage", "reference"), [(0, 2 * 300), (1, 300 + 150), (2, 4 * 300 + 150), (3, 4 * (300 + 300))]
)
def test_the_lower_bound_follows_the_papers_closed_forms(stage, reference):
    actual = reference_wire_bytes(
        stage, gradient_bytes=400, parameter_bytes=200, micro_batches=4, num_ranks=4
    )

    assert actual == pytest.approx(reference)


@pytest.mark.parametrize(("accumulation", "ratio"), [(1, 1.5), (4, 1.8)])
def test_multi_rank_buckets_in_stage_2_send_50_percent_more_than_the_minimum(accumulation, ratio):
    estimated = estimate({"stage": 2}, accumulation=accumulation)

    assert estimated.volume_ratio == pytest.approx(ratio, rel=1e-3)


def test_stage_0_sends_the_minimum():
    estimated = estimate({"stage": 0})

    assert estimated.volume_ratio == pytest.approx(1.0)


def test_a_reduce_per_owner_sends_about_the_minimum():
    estimated = estimate({"stage": 2, "use_multi_rank_bucket_allreduce": False}, accumulation=4)

    assert estimated.volume_ratio == pytest.approx(1.0, rel=1e-3)


def test_one_rank_sends_nothing_and_has_no_ratio():
    estimated = estimate({"stage": 2}, ranks=1)

    assert estimated.wire_bytes == 0
    assert estimated.volume_ratio is None


def test_gloo_sends_an_all_reduce_for_each_reduce_scatter():
    config = {**BF16, "zero_optimization": {"stage": 3}}
    sent = [
        estimate_step(chain(1600), config, Topology(world_size=4, backend=backend)).totals()
        for backend in ("nccl", "gloo")
    ]

    assert sent[1]["reduce_scatter"].wire_bytes == 2 * sent[0]["reduce_scatter"].wire_bytes


def test_a_parameter_larger_than_the_bucket_gets_one_of_its_own():
    buckets = fill_buckets([0, 1, 2, 3], {0: 4, 1: 9, 2: 3, 3: 5}, limit=8)

    assert buckets == [[0], [1], [2, 3]]


def test_a_message_ends_only_above_the_limit():
    messages = combine_messages([4, 4, 1, 7], limit=8)

    assert messages == [9, 7]


def test_a_flat_buffer_is_padded_so_that_every_part_starts_at_four_bytes():
    group = flatten(chain(5, 4), [0, 1], DsOptions(stage=2, model_dtype="bf16"), num_ranks=4)

    assert (group.numel, group.part) == (16, 4)


def test_a_parameter_that_spans_parts_has_several_owners():
    group = flatten(chain(5, 4), [0, 1], DsOptions(stage=2), num_ranks=2)

    assert list(group.slices(group.offsets[1], 4)) == [(0, 1), (1, 3)]


def test_a_tied_weight_gets_its_gradient_where_it_was_first_used():
    layers = tuple(ModuleShape(name=str(n), parameters=(n % 2,)) for n in range(3))
    parameters = tuple(ParameterShape(name=str(n), shape=(1,)) for n in range(2))
    model = ModelShape(parameters=parameters, root=ModuleShape(name="", children=layers))

    assert model.gradient_order() == [1, 0]


def test_a_linear_layer_finishes_its_bias_first_except_in_stage_3():
    layer = ModuleShape(name="", parameters=(0, 1), gradient_order="linear")
    parameters = tuple(ParameterShape(name=name, shape=(1,)) for name in ("weight", "bias"))
    model = ModelShape(parameters=parameters, root=layer)

    assert model.gradient_order() == [1, 0]
    assert model.gradient_order(weights_first=True) == [0, 1]


def gathers(
    options: DsOptions, *, micro_batches: int, model: ModelShape | None = None
) -> list[tuple[int, ...]]:
    """Return the gathers of the last micro-batch, by default of three layers of ten elements."""
    model = chain(10, 10, 10) if model is None else model
    visits, own = module_visits(model)
    numels = [parameter.numel for parameter in model.parameters]
    coordinator = Zero3Coordinator(visits, own, numels, [2] * len(numels), [], options)
    for _ in range(micro_batches):
        last = coordinator.micro_batch()
        coordinator.end_step(range(len(numels)))
    return [gather.parameters for gather in last]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prefetch_bucket_size": 0},
        {"prefetch_bucket_size": 15},
        {"max_reuse_distance": 0, "prefetch_bucket_size": 10},
        {"max_live_parameters": 20, "max_reuse_distance": 10},
        {"hpz_partition_size": 2},
    ],
)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_repeated_passes_are_counted_as_if_each_were_simulated(changes, count):
    visits, own = module_visits(chain(10, 10, 10))
    options = DsOptions(stage=3, **changes)
    one_by_one, at_once = (
        Zero3Coordinator(visits, own, [10, 10, 10], [2, 2, 2], [1], options) for _ in range(2)
    )
    for _ in range(4):
        expected = Counter(g for _ in range(count) for g in one_by_one.micro_batch())
        one_by_one.end_step([0, 1, 2])

        actual = at_once.micro_batches(count)
        at_once.end_step([0, 1, 2])

        assert actual == expected
    assert at_once.peak_bytes == one_by_one.peak_bytes


def test_the_first_micro_batch_gathers_layer_by_layer_both_ways():
    actual = gathers(DsOptions(stage=3), micro_batches=1)

    assert actual == [(0,), (1,), (2,), (2,), (1,), (0,)]


def test_a_traced_micro_batch_prefetches_and_keeps_what_backward_uses():
    actual = gathers(DsOptions(stage=3), micro_batches=4)

    assert actual == [(0, 1, 2)]


def test_without_prefetch_each_layer_is_gathered_once():
    actual = gathers(DsOptions(stage=3, prefetch_bucket_size=0), micro_batches=4)

    assert actual == [(0,), (1,), (2,)]


def test_without_prefetch_and_reuse_each_layer_is_gathered_twice():
    options = DsOptions(stage=3, prefetch_bucket_size=0, max_reuse_distance=0)

    actual = gathers(options, micro_batches=4)

    assert actual == [(0,), (1,), (2,), (2,), (1,), (0,)]


@pytest.mark.parametrize(
    ("distance", "gathered_again"), [(1, [1, 0]), (20, [1, 0]), (21, [0]), (40, [0]), (41, [])]
)
def test_a_layer_is_kept_if_it_is_used_again_within_the_reuse_distance(distance, gathered_again):
    options = DsOptions(stage=3, prefetch_bucket_size=0, max_reuse_distance=distance)

    actual = gathers(options, micro_batches=4)

    assert actual == [(0,), (1,), (2,), *((index,) for index in gathered_again)]


def test_a_weight_that_the_next_layer_shares_is_kept_for_it():
    layers = tuple(
        ModuleShape(name=str(n), parameters=(index,)) for n, index in enumerate((0, 0, 1))
    )
    shapes = tuple(ParameterShape(name=str(n), shape=(10,)) for n in range(2))
    model = ModelShape(parameters=shapes, root=ModuleShape(name="", children=layers))
    options = DsOptions(stage=3, prefetch_bucket_size=0, max_reuse_distance=10)

    actual = gathers(options, micro_batches=4, model=model)

    assert actual == [(0,), (1,), (0,)]


def test_a_parameter_that_stays_gathered_is_gathered_by_no_pass_after_the_first_step():
    visits, own = module_visits(chain(10, 10, 10))
    options = DsOptions(stage=3, prefetch_bucket_size=0, max_reuse_distance=0)
    coordinator = Zero3Coordinator(visits, own, [10, 10, 10], [2, 2, 2], [1], options)

    for _ in range(4):
        passes = [coordinator.micro_batch() for _ in range(2)]
        coordinator.end_step(range(3))

    gathered = [[gather.parameters for gather in each] for each in passes]
    assert gathered == [[(0,), (2,), (2,), (0,)]] * 2


@pytest.mark.parametrize(("distance", "peak"), [(0, 40), (21, 60), (41, 80)])
def test_the_most_bytes_gathered_at_once_are_those_of_the_layers_that_are_kept(distance, peak):
    visits, own = module_visits(chain(10, 10, 10))
    options = DsOptions(stage=3, prefetch_bucket_size=0, max_reuse_distance=distance)
    coordinator = Zero3Coordinator(visits, own, [10, 10, 10], [2, 2, 4], [], options)

    for _ in range(4):
        coordinator.micro_batch()
        coordinator.end_step(range(3))

    assert coordinator.peak_bytes == peak


def test_adam_in_16_bits_holds_16_bytes_per_parameter_at_stage_0():
    config = {**BF16, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 0}}

    memory = estimate_step(chain(1000), config, Topology(world_size=4)).memory

    kinds = ("parameters", "gradients", "optimizer")
    assert [memory.device_bytes[kind] for kind in kinds] == [2000, 2000, 12000]


def test_stage_3_divides_all_states_over_the_ranks():
    config = {**BF16, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}

    memory = estimate_step(chain(1000), config, Topology(world_size=4)).memory

    kinds = ("parameters", "gradients", "optimizer")
    assert [memory.device_bytes[kind] for kind in kinds] == [500, 500, 3000]


def test_an_offloaded_optimizer_moves_from_device_to_host():
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}

    memory = estimate(zero).memory

    assert memory.device_bytes["optimizer"] == 0
    assert memory.host_bytes >= 12 * 6 * 1600 / 8


@pytest.mark.parametrize("stage", [1, 2])
def test_a_remark_explains_why_reduce_scatter_issues_an_all_reduce(stage):
    text = remarks({"stage": stage, "reduce_scatter": True})

    assert "all-reduce, although reduce_scatter is true" in text
    assert "use_multi_rank_bucket_allreduce" in text


@pytest.mark.parametrize(
    ("zero", "config", "words"),
    [
        ({"stage": 2, "use_multi_rank_bucket_allreduce": False}, {}, "one reduce per bucket"),
        ({"stage": 2, "reduce_scatter": False}, {}, "because reduce_scatter is false"),
        ({"stage": 2, "contiguous_gradients": False}, {}, "because contiguous_gradients is false"),
        ({"stage": 3}, {}, "reduce-scatter of each bucket"),
        ({"stage": 1}, {"data_types": {"grad_accum_dtype": "fp32"}}, "BF16_Optimizer"),
        ({"stage": 2, "allgather_bucket_size": 2e8}, {}, "allgather_bucket_size is set and has no"),
        ({"stage": 2, "allgather_partitions": True}, {}, "allgather_partitions is set and has no"),
        ({"stage": 0, "reduce_bucket_size": 1e6}, {}, "reduce_bucket_size is set and has no"),
        ({"stage": 2, "zero_quantized_weights": True}, {}, "Not exact: quantized weights"),
    ],
)
def test_remarks_name_the_gradient_pattern_and_ignored_keys(zero, config, words):
    assert words in remarks(zero, **config)


@pytest.mark.parametrize(
    ("stage", "accumulation", "expected"),
    [
        (2, 1, []),
        (3, 1, []),
        (1, 5, []),
        (
            2,
            5,
            ["reduces its gradients, because they are partitioned. At stage 1 only the last one"],
        ),
        (
            3,
            5,
            ["reduces its gradients and gathers the parameters. Fewer and larger micro-batches"],
        ),
    ],
)
def test_a_remark_names_what_each_micro_batch_sends(stage, accumulation, expected):
    found = estimate({"stage": stage}, accumulation=accumulation).remarks

    each = [text.removeprefix("Each of the 5 micro-batches ") for text in found if "Each" in text]
    assert [text[: len(words)] for text, words in zip(each, expected, strict=True)] == expected


@pytest.mark.parametrize(
    ("stage", "config", "is_assumed"),
    [
        (2, {}, True),
        (3, {}, True),
        (0, {}, False),  # without ZeRO, groups change nothing
        (2, {"optimizer": {"type": "AdamW"}}, False),  # DeepSpeed's own has one group
    ],
)
def test_a_single_param_group_is_an_assumption_if_the_script_creates_the_optimizer(
    stage, config, is_assumed
):
    assumptions = estimate({"stage": stage}, **config).assumptions

    assert ("all parameters are in one param group" in assumptions) is is_assumed


@pytest.mark.parametrize(
    ("stage", "config", "is_named"),
    [
        (0, {}, True),
        (2, {}, True),
        (0, {"optimizer": {"type": "AdamW"}}, False),
        (2, {"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}, True),
        (2, {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, False),
    ],
)
def test_a_remark_names_the_copy_that_an_adam_of_torch_makes_on_a_gpu(stage, config, is_named):
    zero = config.get("zero_optimization", {"stage": stage})

    text = "\n".join(estimate(zero, **config).remarks)

    assert ("without fused=True needs up to 4 more bytes" in text) is is_named


@pytest.mark.parametrize("precision", [BF16, {"fp16": {"enabled": True}}, {}])
@pytest.mark.parametrize("model", [chain(1600), replace(chain(1600), is_pipeline=True)])
def test_gradients_summed_in_another_data_type_need_zero(precision, model):
    sums = {"data_types": {"grad_accum_dtype": "fp32" if precision else "bf16"}}
    config = {"train_micro_batch_size_per_gpu": 1, **precision, **sums}

    with pytest.raises(UnsupportedStageError, match=r"ds.json: data_types.grad_accum_dtype is "):
        estimate_step(model, config, Topology(world_size=8), stage=0, origin="ds.json")

    assert estimate_step(model, config, Topology(world_size=8), stage=1).stage == 1


CPU, ADAM, NO_CLIPPING = {"device": "cpu"}, {"type": "AdamW"}, {"gradient_clipping": 0}
NARROW = {"bf16_master_weights_and_grads": True}
NARROW_BF16 = {"bf16": {"enabled": True, **NARROW}}
BOTH = {**NARROW_BF16, "fp16": {"fp16_master_weights_and_grads": True}}
TORCH_ADAM = {**ADAM, "params": {"torch_adam": True}}
FP32 = {"bf16": {"enabled": False}}
UNTESTED = {"zero_allow_untested_optimizer": True}
UNMANAGED = {"managed_gradient_accumulation": False}
SUMS_IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize(
    ("zero", "config", "rejected"),
    [
        ({"offload_optimizer": {**CPU, "ratio": 0.3}}, {"optimizer": ADAM}, [0, 1, 2]),
        ({"offload_optimizer": {"ratio": 0.3}}, {}, [0, 1, 2]),
        ({"offload_optimizer": {"ratio": 1}}, {}, []),
        ({"compute_grad_norm": False}, NO_CLIPPING, [0, 3]),
        ({"compute_grad_norm": False}, {"gradient_clipping": 0.5}, [0, 1, 2, 3]),
        ({"compute_grad_norm": False}, {}, [0, 1, 2, 3]),  # clipped at 1 by default
        ({"compute_grad_norm": False, "offload_optimizer": CPU}, NO_CLIPPING, [0, 1, 2, 3]),
        ({"compute_grad_norm": False, "cpu_offload": True}, NO_CLIPPING, [0, 1, 2, 3]),
        ({"offload_optimizer": CPU}, {"optimizer": ADAM}, [0]),
        ({"cpu_offload": True}, {"optimizer": ADAM}, [0]),
        ({"offload_optimizer": {"device": "nvme"}}, {"optimizer": {"type": "Lion"}}, [0]),
        ({"offload_optimizer": CPU}, {}, [0]),
        ({"offload_optimizer": CPU}, {"zero_force_ds_cpu_optimizer": False}, []),
        ({"offload_optimizer": CPU}, {"optimizer": {"type": "SGD"}}, [1, 2, 3]),
        ({"offload_optimizer": CPU}, {"optimizer": {"type": "SGD"}, **UNTESTED}, []),
        ({}, {"optimizer": {"type": "Lamb"}}, [1, 2, 3]),
        ({}, {"optimizer": {"type": "Lamb"}, **UNTESTED}, []),
        ({}, {"optimizer": {"type": "Lion"}}, []),
        ({}, {"optimizer": {"type": "Adagrad"}}, []),
        ({}, {"optimizer": {"type": "Muon"}}, []),
        ({"offload_optimizer": {**CPU, "ratio": 0.3}}, {"optimizer": TORCH_ADAM}, [0, 1, 2, 3]),
        ({"offload_optimizer": {**CPU, "ratio": 0.3}}, {}, [0, 1, 2]),
        ({"offload_optimizer": CPU}, {"optimizer": TORCH_ADAM}, []),
        ({}, NARROW_BF16, [0, 1, 2, 3]),  # master weights on the GPU
        ({}, {"bf16": {"enabled": True, **NARROW, "bf16_optimizer_states": True}}, [0]),
        ({}, {**NARROW_BF16, **SUMS_IN_FP32}, [0, 2, 3]),
        ({"offload_optimizer": CPU}, NARROW_BF16, [0]),
        ({}, {"fp16": {"fp16_master_weights_and_grads": True}}, [0, 1, 2, 3]),
        ({"offload_optimizer": CPU}, {"fp16": {"fp16_master_weights_and_grads": True}}, [0]),
        ({"offload_optimizer": CPU}, {**BOTH, "optimizer": ADAM}, [0, 1, 2, 3]),
        ({}, {**BOTH, **SUMS_IN_FP32}, [0, 2, 3]),  # BF16_Optimizer ignores both keys
        ({"offload_optimizer": CPU}, {**NARROW_BF16, "optimizer": ADAM}, [0]),
        ({"offload_optimizer": CPU}, {**NARROW_BF16, "optimizer": TORCH_ADAM}, [0, 1, 2, 3]),
        ({"offload_optimizer": CPU}, {**NARROW_BF16, "optimizer": {"type": "SGD"}}, [0, 1, 2, 3]),
        ({"offload_optimizer": CPU}, {**NARROW_BF16, "optimizer": {"type": "Lion"}}, [0, 1, 2, 3]),
        ({"overlap_comm": True}, UNMANAGED, [0, 1]),
        ({"overlap_comm": True}, {**UNMANAGED, **BF16, **SUMS_IN_FP32}, [0, 1]),
        ({"overlap_comm": False}, UNMANAGED, []),
        ({}, UNMANAGED, []),
        ({"overlap_comm": True}, {}, []),
        ({}, {"gradient_allreduce_op": "Sum"}, [3]),
        ({}, {"gradient_allreduce_op": "mean", "gradient_predivide_factor": 1}, []),
        ({}, {"prescale_gradients": True}, [2, 3]),
        ({}, {"gradient_predivide_factor": 2}, [2, 3]),
        ({}, {"prescale_gradients": True, "gradient_allreduce_op": "sum"}, [3]),
        ({"reduce_scatter": False}, {"prescale_gradients": True}, []),
    ],
)
def test_stages_at_which_deepspeed_rejects_a_key_are_unsupported(zero, config, rejected):
    found = []
    for stage in range(4):
        try:
            estimate({"stage": stage, **zero}, ranks=2, **config)
        except UnsupportedStageError:
            found.append(stage)

    assert found == rejected


@pytest.mark.parametrize(
    ("precision", "dtype", "is_rejected"),
    [(FP32, "bf16", True), (BF16, "fp32", True), (BF16, "bfloat16", False), (FP32, "fp32", False)],
)
def test_the_data_type_of_parameters_must_be_that_of_training(precision, dtype, is_rejected):
    config = {**precision, "data_types": {"param_dtype": dtype}}
    raises = pytest.raises(DsConfigError, match=r"data_types\.param_dtype is ")

    with raises if is_rejected else nullcontext():
        estimate({"stage": 1}, **config)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_pipeline_needs_the_accumulation_of_deepspeed(stage):
    model = replace(chain(1600), is_pipeline=True)
    config = {"train_micro_batch_size_per_gpu": 1, **UNMANAGED}

    with pytest.raises(UnsupportedStageError, match="rejects with pipeline parallelism"):
        estimate_step(model, config, Topology(world_size=8), stage=stage)


@pytest.mark.parametrize("stage", range(4))
def test_optimizer_states_in_16_bits_need_master_weights_in_16_bits_at_every_stage(stage):
    with pytest.raises(DsConfigError, match="needs bf16_master_weights_and_grads"):
        estimate({"stage": stage}, bf16={"enabled": True, "bf16_optimizer_states": True})


def test_an_optimizer_of_deepspeed_for_the_cpu_works_without_zero_on_cpu():
    config = {**BF16, "optimizer": ADAM, "zero_optimization": {"offload_optimizer": CPU}}

    on_cpu = estimate_step(chain(5, 4), config, Topology(world_size=2, backend="gloo"))

    assert on_cpu.stage == 0
    with pytest.raises(UnsupportedStageError, match="offload_optimizer is set, but stage 0"):
        estimate_step(chain(5, 4), config, Topology(world_size=2))


def test_unplanned_features_make_the_estimate_inexact():
    assert estimate({"stage": 3}).exact
    assert not estimate({"stage": 3, "zero_quantized_gradients": True}).exact
    assert not estimate({"stage": 2}, torch_autocast={"enabled": True}).exact


def test_the_order_of_modules_is_an_assumption_only_where_it_matters():
    one_bucket, many_buckets = (
        estimate({"stage": 2}),
        estimate({"stage": 2, "reduce_bucket_size": 2000}),
    )

    assert not any("order" in assumption for assumption in one_bucket.assumptions)
    assert any("order" in assumption for assumption in many_buckets.assumptions)


@pytest.mark.parametrize(("own", "bucket", "is_named"), [((), 1, 0), ((0,), 1, 1), ((0,), 9999, 0)])
def test_modules_that_own_parameters_besides_submodules_are_an_assumption(own, bucket, is_named):
    model = chain(*[1600] * 3)
    model = replace(model, root=replace(model.root, parameters=own), order_known=True)
    config = {**BF16, "zero_optimization": {"stage": 2, "reduce_bucket_size": bucket}}

    assumptions = estimate_step(model, config, Topology(world_size=8)).assumptions

    assert sum("its own parameters" in assumption for assumption in assumptions) == is_named


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, 2),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, 4),
        ({"train_batch_size": 64}, 1),
        ({"train_micro_batch_size_per_gpu": 4}, 1),
        ({"train_batch_size": "auto", "gradient_accumulation_steps": 3}, 3),
    ],
)
def test_accumulation_steps_are_derived_as_in_deepspeed(sizes, steps):
    assert accumulation_steps(sizes, 8) == steps


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"train_batch_size": 60, "train_micro_batch_size_per_gpu": 4}, "train_batch_size 60"),
        ({}, "is missing"),
        ({"gradient_accumulation_steps": "auto"}, "a value here for gradient_accumulation_steps"),
        ({"train_micro_batch_size_per_gpu": -1}, "train_micro_batch_size_per_gpu is -1"),
    ],
)
def test_invalid_batch_sizes_raise(config, words):
    with pytest.raises(DsConfigError, match=words):
        accumulation_steps(config, 8)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4; give 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage is 'auto'"),
        ({"zero_optimization": {"reduce_bucket_size": -5}}, "reduce_bucket_size is -5"),
        ({"zero_optimization": {"reduce_scater": True}}, "did you mean reduce_scatter"),
        ({"zero_optimization": 7}, "zero_optimization is 7; give an object"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true"),
        ({"communication_data_type": "fp8"}, "communication_data_type is 'fp8'"),
        ({"gradient_clipping": "much"}, "gradient_clipping is 'much'"),
        (
            {"bf16": {"enabled": "auto"}, "zero_optimization": {"reduce_bucket_size": "auto"}},
            r"value here for bf16\.enabled, zero_optimization\.reduce_bucket_size",
        ),
    ],
)
def test_an_invalid_configuration_raises_with_key_and_advice(config, words):
    with pytest.raises(DsConfigError, match=words):
        read_options(config, stage=2 if "stage" not in str(config) else None, origin="ds.json")


def test_of_the_gathers_with_hpz_those_of_backward_stay_within_a_group():
    released_at_once = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    zero = {"stage": 3, "zero_hpz_partition_size": 2, **released_at_once}

    gathers = [
        sent
        for sent in estimate({**zero, "stage3_param_persistence_threshold": 0}).collectives
        if sent.purpose == "parameters"
    ]

    # Forward gathers from all 8 ranks, and backward the secondary partitions of a pair, in bf16.
    assert {sent.group_size: sent.payload_bytes for sent in gathers} == {
        8: 6 * 1600 * 2,
        2: 6 * 1600 * 2,
    }


def test_hpz_groups_must_divide_the_ranks():
    with pytest.raises(DsConfigError, match="does not divide 8"):
        estimate({"stage": 3, "zero_hpz_partition_size": 3})


@pytest.mark.parametrize("size", [1_000, 350_000, 125_000_000, 7_000_000_000, 175 * 10**9])
def test_a_typical_transformer_has_exactly_the_size_asked_for(size):
    model = typical_transformer(size)

    assert model.num_parameters == size
    assert all(parameter.numel > 0 for parameter in model.parameters)


@pytest.mark.parametrize(("sequential", "calls"), [(False, set()), (True, {6})])
def test_a_single_rank_gathers_several_persistent_parameters_only_in_sequence(sequential, calls):
    zero = {"stage": 3, "stage3_allgather_sequential": sequential}

    collectives = estimate(zero, ranks=1).collectives

    assert {each.calls for each in collectives if each.op == "all_gather"} == calls


PIPELINE = replace(chain(*[1600] * 6), is_pipeline=True)


def test_a_pipeline_in_bf16_without_zero_partitions_its_optimizer():
    found = estimate_step(PIPELINE, BF16, Topology(world_size=8))

    assert found.memory.device_bytes["optimizer"] == 12 * 9600 // 8
    assert {each.op for each in found.collectives} == {"all_reduce", "all_gather"}
    assert "A pipeline in bf16 runs DeepSpeed's BF16_Optimizer" in found.remarks[0]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_pipeline_has_neither_stage_2_nor_3(stage):
    config = {**BF16, "zero_optimization": {"stage3_prefetch_bucket_size": "auto"}}
    with pytest.raises(UnsupportedStageError, match=f"does not support ZeRO-{stage} with pipeline"):
        estimate_step(PIPELINE, config, Topology(world_size=8), stage=stage)
