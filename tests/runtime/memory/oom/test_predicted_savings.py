"""Tests of predicted savings, each against a manual calculation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes.ooms import CATEGORIES, GIB, MIB

from zerowatch.runtime.memory.forecast.peak_readings import Shape
from zerowatch.runtime.memory.oom.predicted_savings import (
    Layout,
    LayoutBytes,
    OomCase,
    PredictedSaving,
    nothing_fits,
    predicted_savings,
)

# 100 MiB that stay, and 50 KiB for each token.
BATCH = Shape(8, 2048)


BIG_BUFFERS = {**CATEGORIES, "comm_buffers": 80.0 * MIB}


def predict_peak(shape: Shape) -> float:
    return 100 * MIB + 51200.0 * shape.samples * shape.length


def oom_case(**changes: Any) -> OomCase:
    """Return a step that needed 900 MiB with a limit of 800 MiB."""
    case = OomCase(
        device="cuda:0",
        in_use_bytes=700.0 * MIB,
        requested_bytes=150.0 * MIB,
        limit_bytes=800.0 * MIB,
        shape=BATCH,
        predict_peak=predict_peak,
        accumulation=2,
        activation_checkpointing=False,
    )
    return replace(case, **changes)


def found(case: OomCase, text: str) -> PredictedSaving:
    (saving,) = [each for each in predicted_savings(case) if text in each.description]
    return saving


def test_the_need_is_the_largest_known_estimate() -> None:
    assert oom_case().need_bytes == 900.0 * MIB
    assert oom_case(requested_bytes=500.0 * MIB).need_bytes == 1200.0 * MIB
    # Less was in use at the reading; the need exceeded the limit anyway.
    small = oom_case(in_use_bytes=10.0 * MIB, predict_peak=lambda shape: None)
    assert small.need_bytes == 800.0 * MIB


@pytest.mark.parametrize(("part", "samples", "need"), [("half", 4, 500), ("a quarter", 2, 300)])
def test_a_smaller_micro_batch_keeps_the_global_batch_by_accumulation(
    part: str, samples: int, need: int
) -> None:
    saving = found(oom_case(), f"{part} the micro-batch, {samples} of 8 samples")

    assert saving.need_bytes == need * MIB
    assert saving.fits == "yes"
    assert f"{2 * 8 // samples} micro-batches a step (the global batch stays)" in saving.description


def test_a_part_of_an_odd_micro_batch_is_rounded_up_and_the_global_batch_grows() -> None:
    saving = found(oom_case(shape=Shape(3, 2048)), "half the micro-batch, 2 of 3 samples")

    assert "4 micro-batches a step (the global batch grows)" in saving.description


def test_a_micro_batch_of_one_sample_cannot_be_halved() -> None:
    case = oom_case(shape=Shape(1, 16384))

    assert not [each for each in predicted_savings(case) if "the micro-batch" in each.description]


def test_the_greatest_length_that_fits_with_a_margin_is_named() -> None:
    saving = found(oom_case(), "a maximum length of")

    # (0.95 * 800 - 100) MiB / 50 KiB / 8 samples, in multiples of 8
    assert saving.description.startswith("a maximum length of 1688 instead of 2048")
    assert saving.fits == "yes"


def test_leaked_memory_is_needed_with_any_batch() -> None:
    leaked = oom_case(in_use_bytes=1000.0 * MIB)  # 250 MiB more than any batch explains

    assert found(leaked, "a quarter the micro-batch").need_bytes == (300 + 250) * MIB


def test_without_a_forecast_activations_scale_with_the_tokens() -> None:
    case = oom_case(predict_peak=lambda shape: None, between_steps_bytes=450.0 * MIB)
    looked_at = oom_case(predict_peak=lambda shape: None, categories=CATEGORIES)

    # 850 MiB were needed: 450 in use between steps, and 400 of activations.
    assert found(case, "half the micro-batch").need_bytes == 650 * MIB
    assert found(case, "a quarter the micro-batch").need_bytes == 550 * MIB
    assert found(looked_at, "half the micro-batch").need_bytes == 650 * MIB


def test_no_memory_saving_needs_less_than_what_is_in_use_between_steps() -> None:
    case = oom_case(between_steps_bytes=600.0 * MIB)

    assert found(case, "a quarter the micro-batch").need_bytes == 600 * MIB


def test_estimates_far_beyond_the_batches_that_fitted_are_guesses() -> None:
    case = oom_case(largest_tokens=8 * 256)

    assert (found(case, "half the").kind, found(case, "half the").fits) == ("guess", "perhaps")
    assert (found(case, "a quarter the").kind, found(case, "a quarter the").fits) == (
        "forecast",
        "yes",
    )


def test_without_forecast_and_categories_smaller_batches_have_no_estimate() -> None:
    listed = predicted_savings(oom_case(predict_peak=lambda shape: None))

    assert [each.description.partition(" the micro-batch")[0] for each in listed] == [
        "half",
        "a quarter",
    ]
    assert {(each.kind, each.fits) for each in listed} == {("unknown", "perhaps")}


def test_checkpointing_has_only_a_lower_bound() -> None:
    case = oom_case(between_steps_bytes=450.0 * MIB)

    saving = found(case, "activation checkpointing")

    assert (saving.need_bytes, saving.fits) == (450 * MIB, "perhaps")
    tight = replace(case, limit_bytes=400.0 * MIB)
    assert found(tight, "activation checkpointing").fits == "no"
    on = replace(case, activation_checkpointing=True)
    assert not [each for each in predicted_savings(on) if "checkpointing" in each.description]


def test_smaller_buckets_are_listed_if_there_are_buffers() -> None:
    saving = found(oom_case(categories=BIG_BUFFERS), "reduce_bucket_size")

    assert saving.need_bytes == (900 - 60) * MIB
    assert saving.fits == "no"


def test_smaller_buckets_are_not_listed_if_they_save_less_than_the_forecast_error() -> None:
    listed = predicted_savings(oom_case(categories=CATEGORIES))

    assert not [each for each in listed if "reduce_bucket_size" in each.description]


def test_avoiding_fragmentation_fits_only_if_the_fragmented_bytes_suffice() -> None:
    some = oom_case(fragmented_bytes=50.0 * MIB)
    enough = oom_case(fragmented_bytes=200.0 * MIB)

    assert found(some, "expandable_segments").fits == "no"
    assert found(enough, "expandable_segments").fits == "yes"
    on_cpu = replace(enough, device="cpu")
    assert not [each for each in predicted_savings(on_cpu) if "expandable" in each.description]


PLANNED = {
    Layout(1): LayoutBytes(device_bytes=500.0 * MIB, host_bytes=0.0),
    Layout(2): LayoutBytes(device_bytes=470.0 * MIB, host_bytes=0.0),
    Layout(3): LayoutBytes(device_bytes=300.0 * MIB, host_bytes=0.0),
    Layout(1, "cpu"): LayoutBytes(device_bytes=250.0 * MIB, host_bytes=1.0 * GIB),
    Layout(3, "cpu", "cpu"): LayoutBytes(device_bytes=50.0 * MIB, host_bytes=2.0 * GIB),
}


def sharded(**changes: Any) -> OomCase:
    return oom_case(layout=Layout(1), planned=PLANNED, world_size=4, **changes)


def test_higher_stages_save_the_difference_of_the_plans() -> None:
    assert found(sharded(), "ZeRO stage 2").need_bytes == (900 - 30) * MIB
    assert found(sharded(), "ZeRO stage 2").fits == "no"
    assert found(sharded(), "ZeRO stage 3 (1.5").need_bytes == (900 - 200) * MIB
    assert found(sharded(), "ZeRO stage 3 (1.5").fits == "yes"


def test_one_rank_has_no_memory_saving_by_sharding() -> None:
    alone = replace(sharded(), world_size=1)

    assert not [
        each for each in predicted_savings(alone) if each.description.startswith("ZeRO stage 2")
    ]


def test_offloading_fits_only_if_the_host_has_enough_free_memory() -> None:
    case = sharded(host_free_bytes=1.5 * GIB)

    optimizer = found(case, "offload_optimizer to cpu (")
    both = found(case, "offload_param to cpu")

    assert (optimizer.need_bytes, optimizer.fits) == ((900 - 250) * MIB, "yes")
    assert (both.need_bytes, both.fits) == ((900 - 450) * MIB, "no")
    assert both.description.endswith("too large for the host")


def test_on_cpu_offloading_to_the_same_memory_is_no_memory_saving() -> None:
    on_cpu = sharded(device="cpu")

    assert not [each for each in predicted_savings(on_cpu) if "to cpu" in each.description]
    assert found(on_cpu, "ZeRO stage 3 (1.5").need_bytes == 700 * MIB


def test_sharding_or_nvme_fits_if_offloads_fill_the_host() -> None:
    now, sharing = Layout(2, "cpu"), Layout(3, "nvme")
    host = sharded(
        device="cpu",
        trains_here=False,
        predict_peak=lambda shape: None,
        limit_bytes=2.0 * GIB,
        in_use_bytes=1.9 * GIB,
    )
    planned = {
        now: LayoutBytes(device_bytes=1.0 * GIB, host_bytes=1.5 * GIB),
        Layout(3, "cpu"): LayoutBytes(device_bytes=0.5 * GIB, host_bytes=1.4 * GIB),
        sharing: LayoutBytes(device_bytes=1.0 * GIB, host_bytes=0.5 * GIB),
    }

    case = replace(host, layout=now, planned=planned)

    need = case.need_bytes
    to_nvme = found(case, "ZeRO stage 3 with offload_optimizer to nvme (")
    assert to_nvme.need_bytes == need - 1.0 * GIB
    assert found(case, "ZeRO stage 3 (1.5").need_bytes == pytest.approx(need - 0.1 * GIB)


def test_the_memory_saving_that_costs_training_least_comes_first() -> None:
    case = sharded(fragmented_bytes=200.0 * MIB, categories=BIG_BUFFERS)

    texts = [each.description.partition(" (")[0] for each in predicted_savings(case)]

    assert texts == [
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which avoids fragmentation",
        "a quarter of reduce_bucket_size",
        "ZeRO stage 2",
        "half the micro-batch, 4 of 8 samples, and 4 micro-batches a step",
        "a quarter the micro-batch, 2 of 8 samples, and 8 micro-batches a step",
        "activation checkpointing",
        "ZeRO stage 3",
        "offload_optimizer to cpu",
        "ZeRO stage 3 with offload_optimizer and offload_param to cpu",
        "a maximum length of 1688 instead of 2048",
    ]


def test_a_memory_saving_too_close_to_the_limit_fits_barely() -> None:
    case = oom_case(limit_bytes=510.0 * MIB)

    assert found(case, "half the micro-batch").fits == "barely"
    assert found(case, "a quarter the micro-batch").fits == "yes"


def test_nothing_may_fit() -> None:
    case = oom_case(limit_bytes=90.0 * MIB)

    assert nothing_fits(predicted_savings(case))
    assert not nothing_fits(predicted_savings(oom_case()))
