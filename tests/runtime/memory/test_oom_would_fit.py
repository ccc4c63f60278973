"""What would have fitted: each remedy by itself, against sums made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes.ooms import CATEGORIES, GIB, MIB

from zerowatch.runtime.memory.forecast.series import Shape
from zerowatch.runtime.memory.oom.would_fit import (
    Layout,
    LayoutBytes,
    OomCase,
    Remedy,
    nothing_fits,
    remedies,
)

# 100 MiB that stay, and 50 KiB for each token.
BATCH = Shape(8, 2048)


BIG_BUFFERS = {**CATEGORIES, "comm_buffers": 80.0 * MIB}


def predicted(shape: Shape) -> float:
    return 100 * MIB + 51200.0 * shape.samples * shape.length


def shortage(**changes: Any) -> OomCase:
    """Return a step that needed 900 MiB of 800."""
    facts = OomCase(
        device="cuda:0",
        in_use_bytes=700.0 * MIB,
        requested_bytes=150.0 * MIB,
        limit_bytes=800.0 * MIB,
        shape=BATCH,
        predicted=predicted,
        accumulation=2,
        checkpointing=False,
    )
    return replace(facts, **changes)


def found(facts: OomCase, words: str) -> Remedy:
    (remedy,) = [each for each in remedies(facts) if words in each.words]
    return remedy


def test_the_need_is_the_most_that_is_known_of_it() -> None:
    assert shortage().need_bytes == 900.0 * MIB
    assert shortage(requested_bytes=500.0 * MIB).need_bytes == 1200.0 * MIB
    # Less was in use when it was read; it was more than the limit all the same.
    small = shortage(in_use_bytes=10.0 * MIB, predicted=lambda shape: None)
    assert small.need_bytes == 800.0 * MIB


@pytest.mark.parametrize(("part", "samples", "need"), [("half", 4, 500), ("a quarter", 2, 300)])
def test_a_smaller_micro_batch_keeps_the_global_batch_by_accumulation(
    part: str, samples: int, need: int
) -> None:
    remedy = found(shortage(), f"{part} the micro-batch, {samples} of 8 samples")

    assert remedy.need_bytes == need * MIB
    assert remedy.fits == "yes"
    assert f"{2 * 8 // samples} micro-batches a step (the global batch stays)" in remedy.words


def test_a_micro_batch_of_one_sample_cannot_be_halved() -> None:
    facts = shortage(shape=Shape(1, 16384))

    assert not [each for each in remedies(facts) if "the micro-batch" in each.words]


def test_the_greatest_length_that_fits_with_a_margin_is_named() -> None:
    remedy = found(shortage(), "a maximum length of")

    # (0.95 * 800 - 100) MiB / 50 KiB / 8 samples, in multiples of 8
    assert remedy.words.startswith("a maximum length of 1688 instead of 2048")
    assert remedy.fits == "yes"


def test_what_a_leak_has_added_stays_whatever_the_batch() -> None:
    leaked = shortage(in_use_bytes=1000.0 * MIB)  # 250 MiB more than any batch explains

    assert found(leaked, "a quarter the micro-batch").need_bytes == (300 + 250) * MIB


def test_without_a_forecast_what_the_batch_took_shrinks_with_its_tokens() -> None:
    facts = shortage(predicted=lambda shape: None, floor_bytes=450.0 * MIB)
    looked_at = shortage(predicted=lambda shape: None, categories=CATEGORIES)

    # 850 MiB were needed, of which 450 lie there between steps; 400 are activations.
    assert found(facts, "half the micro-batch").need_bytes == 650 * MIB
    assert found(facts, "a quarter the micro-batch").need_bytes == 550 * MIB
    assert found(looked_at, "half the micro-batch").need_bytes == 650 * MIB


def test_nothing_takes_less_than_what_is_in_use_between_steps() -> None:
    facts = shortage(floor_bytes=600.0 * MIB)

    assert found(facts, "a quarter the micro-batch").need_bytes == 600 * MIB


def test_figures_far_beyond_the_batches_that_fitted_are_called_guesses() -> None:
    facts = shortage(largest_tokens=8 * 256)

    assert (found(facts, "half the").kind, found(facts, "half the").fits) == ("guess", "perhaps")
    assert (found(facts, "a quarter the").kind, found(facts, "a quarter the").fits) == (
        "forecast",
        "yes",
    )


def test_without_a_forecast_and_categories_smaller_batches_are_named_without_a_figure() -> None:
    told = remedies(shortage(predicted=lambda shape: None))

    assert [each.words.partition(" the micro-batch")[0] for each in told] == ["half", "a quarter"]
    assert {(each.kind, each.fits) for each in told} == {("unknown", "perhaps")}


def test_checkpointing_is_given_as_a_bound_only() -> None:
    facts = shortage(floor_bytes=450.0 * MIB)

    remedy = found(facts, "activation checkpointing")

    assert (remedy.need_bytes, remedy.fits) == (450 * MIB, "perhaps")
    tight = replace(facts, limit_bytes=400.0 * MIB)
    assert found(tight, "activation checkpointing").fits == "no"
    on = replace(facts, checkpointing=True)
    assert not [each for each in remedies(on) if "checkpointing" in each.words]


def test_smaller_buckets_are_named_where_there_are_any() -> None:
    remedy = found(shortage(categories=BIG_BUFFERS), "reduce_bucket_size")

    assert remedy.need_bytes == (900 - 60) * MIB
    assert remedy.fits == "no"


def test_smaller_buckets_are_not_named_where_they_save_less_than_forecasts_miss_by() -> None:
    told = remedies(shortage(categories=CATEGORIES))

    assert not [each for each in told if "reduce_bucket_size" in each.words]


def test_fragmentation_is_blamed_only_where_the_pieces_would_have_been_enough() -> None:
    some = shortage(unusable_bytes=50.0 * MIB)
    enough = shortage(unusable_bytes=200.0 * MIB)

    assert found(some, "expandable_segments").fits == "no"
    assert found(enough, "expandable_segments").fits == "yes"
    on_cpu = replace(enough, device="cpu")
    assert not [each for each in remedies(on_cpu) if "expandable" in each.words]


PLANNED = {
    Layout(1): LayoutBytes(device_bytes=500.0 * MIB, host_bytes=0.0),
    Layout(2): LayoutBytes(device_bytes=470.0 * MIB, host_bytes=0.0),
    Layout(3): LayoutBytes(device_bytes=300.0 * MIB, host_bytes=0.0),
    Layout(1, "cpu"): LayoutBytes(device_bytes=250.0 * MIB, host_bytes=1.0 * GIB),
    Layout(3, "cpu", "cpu"): LayoutBytes(device_bytes=50.0 * MIB, host_bytes=2.0 * GIB),
}


def sharded(**changes: Any) -> OomCase:
    return shortage(layout=Layout(1), planned=PLANNED, world_size=4, **changes)


def test_the_next_stages_save_what_the_plans_differ_by() -> None:
    assert found(sharded(), "ZeRO stage 2").need_bytes == (900 - 30) * MIB
    assert found(sharded(), "ZeRO stage 2").fits == "no"
    assert found(sharded(), "ZeRO stage 3 (half").need_bytes == (900 - 200) * MIB
    assert found(sharded(), "ZeRO stage 3 (half").fits == "yes"


def test_one_rank_has_nobody_to_share_with() -> None:
    alone = replace(sharded(), world_size=1)

    assert not [each for each in remedies(alone) if each.words.startswith("ZeRO stage 2")]


def test_offloading_is_offered_where_the_host_has_room_for_it() -> None:
    facts = sharded(host_room_bytes=1.5 * GIB)

    optimizer = found(facts, "offload_optimizer to cpu (")
    both = found(facts, "offload_param to cpu")

    assert (optimizer.need_bytes, optimizer.fits) == ((900 - 250) * MIB, "yes")
    assert (both.need_bytes, both.fits) == ((900 - 450) * MIB, "no")
    assert both.words.endswith("the host has no room for that")


def test_on_cpu_offloading_to_the_same_memory_is_no_remedy() -> None:
    on_cpu = sharded(device="cpu")

    assert not [each for each in remedies(on_cpu) if "to cpu" in each.words]
    assert found(on_cpu, "ZeRO stage 3 (half").need_bytes == 700 * MIB


def test_a_host_that_offloads_fill_is_emptied_by_sharding_or_nvme() -> None:
    now, sharing = Layout(2, "cpu"), Layout(3, "nvme")
    host = sharded(
        device="cpu",
        trains_here=False,
        predicted=lambda shape: None,
        limit_bytes=2.0 * GIB,
        in_use_bytes=1.9 * GIB,
    )
    planned = {
        now: LayoutBytes(device_bytes=1.0 * GIB, host_bytes=1.5 * GIB),
        Layout(3, "cpu"): LayoutBytes(device_bytes=0.5 * GIB, host_bytes=1.4 * GIB),
        sharing: LayoutBytes(device_bytes=1.0 * GIB, host_bytes=0.5 * GIB),
    }

    facts = replace(host, layout=now, planned=planned)

    need = facts.need_bytes
    assert found(facts, "offload_optimizer to nvme (").need_bytes == need - 1.0 * GIB
    assert found(facts, "ZeRO stage 3 (half").need_bytes == pytest.approx(need - 0.1 * GIB)


def test_the_cheapest_for_training_comes_first() -> None:
    facts = sharded(unusable_bytes=200.0 * MIB, categories=BIG_BUFFERS)

    first_words = [each.words.partition(" (")[0] for each in remedies(facts)]

    assert first_words == [
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which leaves no such pieces",
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


def test_what_comes_too_near_the_limit_fits_barely() -> None:
    facts = shortage(limit_bytes=510.0 * MIB)

    assert found(facts, "half the micro-batch").fits == "barely"
    assert found(facts, "a quarter the micro-batch").fits == "yes"


def test_nothing_may_fit() -> None:
    facts = shortage(limit_bytes=90.0 * MIB)

    assert nothing_fits(remedies(facts))
    assert not nothing_fits(remedies(shortage()))
