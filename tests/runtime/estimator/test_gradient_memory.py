"""Bytes of gradients by stage, each against a manual calculation.

Two layers of 1000 and 200 elements, trained by 4 ranks: each has a part of 300 elements, the fourth
one of both layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zerowatch.runtime.estimator.ds_options import DsOptions
from zerowatch.runtime.estimator.gradient_memory import GradientMemory, gradient_memory
from zerowatch.runtime.estimator.model_shape import ModelShape, ModuleShape, ParameterShape
from zerowatch.runtime.estimator.optimizer_places import PartitionSizes
from zerowatch.runtime.estimator.stage_3_traffic import sub_groups

BF16 = {"model_dtype": "bf16", "accumulation_dtype": "bf16", "communication_dtype": "bf16"}
PARTS = PartitionSizes(part=300, whole=1200, width=2)


def layers(*numels: int, groups: tuple[int, ...] = ()) -> ModelShape:
    modules = tuple(ModuleShape(name=str(n), parameters=(n,)) for n in range(len(numels)))
    parameters = tuple(
        ParameterShape(name=str(n), shape=(size,), group_index=groups[n] if groups else 0)
        for n, size in enumerate(numels)
    )
    return ModelShape(parameters=parameters, root=ModuleShape(name="", children=modules))


def gradients(
    stage: int, *, model: ModelShape | None = None, sizes: PartitionSizes = PARTS, **changes: Any
) -> GradientMemory:
    options = DsOptions(stage=stage, **(BF16 | {"reduce_bucket_size": 5000} | changes))
    model = model or layers(1000, 200)
    if stage == 3:
        sizes = replace(sizes, sub_groups=tuple(sub_groups(model, options, 4)))
    return gradient_memory(model, options, sizes)


@pytest.mark.parametrize(
    ("changes", "sent", "in_step"),
    [
        ({}, 2, 2 + 4),
        ({"communication_dtype": "fp32"}, 2 + 4, 2 + 4),
        ({"optimizer": "adamw"}, 2, 2 + 4 + 4),
        ({"optimizer": "adamw", "legacy_fusion": True}, 2, 2 + 4),
        ({"optimizer": "lamb"}, 2, 2 + 4),
        ({"optimizer": "adam", "low_precision_master": True}, 2, 2 + 2),
        ({"model_dtype": None}, 2, 2),
    ],
)
def test_stage_0_sends_a_flat_copy_and_steps_with_fp32_copies(
    changes: dict[str, Any], sent: int, in_step: int
) -> None:
    assert gradients(0, **changes) == GradientMemory(
        kept=2400,
        buffers=0,
        transient=1200 * sent,
        in_step=1200 * in_step,
        accumulated_in_forward=2400,
    )


@pytest.mark.parametrize(
    ("sent", "model", "transient"),
    [
        ("bf16", None, 1200 * 2),
        ("fp32", None, 0),  # sent in place
        ("fp32", layers(1000, 200, groups=(0, 1)), 1200 * 4),
    ],
)
def test_the_optimizer_of_bf16_keeps_all_gradients_in_fp32_too(
    sent: str, model: ModelShape | None, transient: int
) -> None:
    found = gradients(1, model=model, accumulation_dtype="fp32", communication_dtype=sent)

    assert found == GradientMemory(
        kept=1200 * (2 + 4),
        buffers=0,
        transient=transient,
        in_step=1200 * (2 + 4),
        in_forward=1200 * 4,
        accumulated_in_forward=1200 * 2,
    )


@pytest.mark.parametrize(("sent", "transient"), [("bf16", 1000 * (2 + 4)), ("fp32", 1000 * 6)])
def test_an_immediate_update_drops_each_gradient_once_it_is_summed(
    sent: str, transient: int
) -> None:
    found = gradients(
        1, accumulation_dtype="fp32", communication_dtype=sent, immediate_grad_update=True
    )

    assert found == GradientMemory(
        kept=1200 * 4, buffers=0, transient=transient, in_step=1200 * 4, in_forward=1200 * 4
    )


def test_a_pipeline_in_bf16_sums_in_bf16_and_steps_with_a_part_in_fp32() -> None:
    assert gradients(0, is_pipeline=True) == GradientMemory(
        kept=1200 * (2 + 2),
        buffers=0,
        transient=0,
        in_step=1200 * (2 + 2) + 300 * 4,
        in_forward=1200 * 2,
        accumulated_in_forward=1200 * 2,
    )


def test_stage_1_collects_all_gradients_before_it_reduces_one_bucket() -> None:
    assert gradients(1) == GradientMemory(
        kept=2400,  # the fourth rank owns of both layers
        buffers=5000 * 2,
        transient=0,
        in_step=2400 + 300 * 8,  # the norm in fp64 is larger than the fp32 copy
        accumulated_in_forward=2400,
    )


def test_stage_1_with_small_buckets_frees_what_a_rank_owns() -> None:
    # The buckets are [0] and [1], both too small for their layer. In the first, the last rank has
    # 1200 collected, and a message of 1000; then it keeps 1200 more, and frees 1000.
    assert gradients(1, reduce_bucket_size=100) == GradientMemory(
        kept=1200 * 2 + 1200 * 2,
        buffers=100 * 2,
        transient=0,
        in_step=2400 + 300 * 8,
        accumulated_in_forward=2400,
    )


def test_stage_2_keeps_the_layers_of_which_it_owns_a_part() -> None:
    assert gradients(2) == GradientMemory(
        kept=2400,
        buffers=5000 * 2,
        transient=0,
        in_step=2400 + 300 * 8,
        accumulated=2400,
        accumulated_in_forward=2400,
    )


def test_stage_2_has_a_layer_larger_than_the_bucket_three_times() -> None:
    # When the first layer is reduced, it is there, in the message and in what the rank keeps.
    assert gradients(2, reduce_bucket_size=100) == GradientMemory(
        kept=2400,
        buffers=100 * 2,
        transient=1000 * 2 + 1000 * 2,
        in_step=2400 + 300 * 8,
        accumulated=2400,
        accumulated_in_forward=2400,
    )


def test_without_contiguous_gradients_a_bucket_is_copied_and_not_reserved() -> None:
    assert gradients(2, contiguous_gradients=False) == GradientMemory(
        kept=2400,
        buffers=0,
        transient=2400,
        in_step=2400 + 300 * 8,
        accumulated=2400,
        accumulated_in_forward=2400,
    )


def test_fp32_sums_of_16_bit_gradients_are_kept_for_the_part_only() -> None:
    assert gradients(2, accumulation_dtype="fp32") == GradientMemory(
        kept=300 * 4,
        buffers=5000 * 2,
        transient=1200 * 2 + 300 * 4,  # the message, and the own part in fp32
        in_step=300 * 4 + 300 * 8,
        accumulated_in_forward=300 * 4,
    )


def test_with_the_optimizer_on_the_host_gradients_are_there() -> None:
    place: dict[str, Any] = {"offload_optimizer": "cpu", "pin_optimizer": False}

    assert gradients(2, **place, overlap_comm=True) == GradientMemory(
        kept=0,
        buffers=2 * 5000 * 2 + 1000 * 2,  # two buckets, and a buffer of the largest layer
        transient=1000 * 8,  # the norm of the largest layer in fp64
        in_step=1000 * 2,
        in_forward=1000 * 2,
        host=300 * (4 + 2) + 1000 * 2,
        host_accumulated=2400,
    )


def test_the_copies_of_the_step_count_if_they_are_larger_than_the_norm() -> None:
    small = layers(*[100] * 12)

    found = gradients(2, model=small)

    assert found.in_step == found.kept + 300 * (2 + 4)
    assert gradients(2, model=small, low_precision_master=True).in_step == found.kept + 300 * 2 + (
        100 * 8 - 300 * 2
    )


def test_stage_3_keeps_its_part_and_reserves_a_bucket() -> None:
    assert gradients(3, reduce_bucket_size=500) == GradientMemory(
        kept=300 * 2,
        buffers=500 * 2,
        transient=1000 * 2,  # the layer larger than the bucket
        in_step=500 * 2 + 300 * 2 + 250 * 8,  # the norm of a quarter of the largest layer
        in_forward=500 * 2 + 300 * 2,
    )


# These sub-groups are too small for NVMe.
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_stage_3_with_the_optimizer_on_the_host(place: str) -> None:
    assert gradients(3, reduce_bucket_size=500, offload_optimizer=place) == GradientMemory(
        kept=0,
        buffers=500 * 2,
        transient=1000 * 2 + 250 * 8,
        in_step=500 * 2,
        in_forward=500 * 2,
        host=300 * 2 + 300 * 4,
    )


def test_stage_3_with_a_part_of_the_optimizer_on_the_host() -> None:
    # Two of the four sub-groups: int(0.5 x 4).
    assert gradients(
        3,
        model=layers(*[100] * 12),
        sub_group_size=75,
        reduce_bucket_size=500,
        offload_optimizer="cpu",
        offload_optimizer_ratio=0.5,
    ) == GradientMemory(
        kept=150 * 4,
        buffers=500 * 2,
        transient=500 * 2,
        in_step=500 * 2 + 150 * 4,
        in_forward=500 * 2 + 150 * 4,
        host=300 * 2 + 150 * 4,
    )


@pytest.mark.parametrize(
    ("changes", "buffers", "transient", "in_step"),
    [
        ({}, 1000, 1000, 1000 + 600 + 300 * (2 + 4)),
        # A sub-group may exceed its size by one parameter of this rank.
        ({"sub_group_size": 40}, 1000, 1000, 1000 + 600 + 50 * (2 + 4)),
        ({"sub_group_size": 40, "low_precision_master": True}, 1000, 1000, 1000 + 600 + 200),
        ({"reduce_scatter": False}, 1000, 0, 1000 + 600 + 300 * (2 + 4)),
        ({"contiguous_gradients": False}, 0, 1000, 600 + 300 * (2 + 4)),
        ({"reduce_bucket_size": 9000}, 18000, 2400, 18000 + 600 + 300 * (2 + 4)),
    ],
)
def test_stage_3_with_small_layers(
    changes: dict[str, Any], buffers: int, transient: int, in_step: int
) -> None:
    found = gradients(3, model=layers(*[100] * 12), **({"reduce_bucket_size": 500} | changes))

    assert (found.buffers, found.transient, found.in_step) == (buffers, transient, in_step)


@pytest.mark.parametrize(("part", "whole", "ranks"), [(300, 1200, 4), (301, 1200, 4), (0, 0, 1)])
def test_the_ranks_follow_from_the_part(part: int, whole: int, ranks: int) -> None:
    assert PartitionSizes(part=part, whole=whole, width=2).ranks == ranks


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_a_model_without_trained_parameters_has_no_gradients(stage: int) -> None:
    frozen = ParameterShape(name="a", shape=(5,), requires_grad=False)
    model = ModelShape(parameters=(frozen,), root=ModuleShape(name="", parameters=(0,)))

    found = gradients(stage, model=model, sizes=PartitionSizes(part=0, whole=0, width=2))

    assert (found.kept, found.transient) == (0, 0)
