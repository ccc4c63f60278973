"""Tests of the inputs of an estimate: sizes, micro-batches, and values in place of "auto"."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zerowatch.errors import CommandLineError
from zerowatch.runtime.cli.estimate.auto_values import TrainingValues, fill_in
from zerowatch.runtime.cli.estimate.inputs import (
    EstimatedModel,
    MemoryOptions,
    RankBatch,
    read_batch,
    read_model,
)
from zerowatch.runtime.estimator.model_shape import Topology
from zerowatch.runtime.estimator.typical_model import typical_transformer

SMALL = EstimatedModel(shape=typical_transformer(125_000_000))  # its hidden size is 768


def batch_of(config: dict[str, Any], ranks: Topology | None = None, **given: Any) -> RankBatch:
    options = MemoryOptions(**{"sequence": 128, **given})
    return read_batch(options, config, SMALL, ranks or Topology(world_size=4), "ds.json")


@pytest.mark.parametrize(
    ("size", "number"),
    [
        ("2000", 2000),
        ("1.5k", 1500),
        ("125M", 125_000_000),
        ("7b", 7_000_000_000),
        ("1T", 10**12),
    ],
)
def test_a_number_of_parameters_has_decimal_units(size: str, number: int) -> None:
    assert read_model(size, None).shape.num_parameters == number


@pytest.mark.parametrize(("size", "is_enough"), [("1000", True), ("999", False)])
def test_a_model_has_a_thousand_parameters_or_more(size: str, is_enough: bool) -> None:
    if is_enough:
        assert read_model(size, None).shape.num_parameters == 1000
    else:
        with pytest.raises(CommandLineError, match="too small; give 1000 or more"):
            read_model(size, None)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1kB", 1000),
        ("1KiB", 1024),
        ("3MB", 3 * 10**6),
        ("3MiB", 3 * 2**20),
        ("24GB", 24 * 10**9),
        ("80GiB", 80 * 2**30),
        (" 1.5 tb ", 15 * 10**11),
        ("2TiB", 2**41),
    ],
)
def test_a_memory_has_decimal_or_binary_units(text: str, num_bytes: int) -> None:
    batch = batch_of({"train_micro_batch_size_per_gpu": 1}, memory=text)

    assert batch.limit_bytes == num_bytes


@pytest.mark.parametrize("text", ["80", "GiB", "-1GB", "0GB", "nanGB", "infGB", "1XB"])
def test_a_memory_without_a_unit_or_a_number_is_refused(text: str) -> None:
    with pytest.raises(CommandLineError, match="is not a size; give it as 80GiB or 24GB"):
        batch_of({"train_micro_batch_size_per_gpu": 1}, memory=text)


@pytest.mark.parametrize(
    ("config", "given", "samples", "steps"),
    [
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}, {}, 3, 5),
        ({"train_micro_batch_size_per_gpu": 3}, {"micro_batch": 7}, 7, 1),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 2}, {}, 3, 2),
        ({"train_batch_size": 24, "sequence_parallel_size": 2}, {}, 12, 1),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}, {}, 2, 3),
    ],
)
def test_a_micro_batch_is_given_configured_or_derived(
    config: dict[str, Any], given: dict[str, Any], samples: int, steps: int
) -> None:
    batch = batch_of(config, **given)

    assert (batch.samples, batch.micro_batches) == (samples, steps)
    assert batch.activations is not None and batch.activations.tokens == 128
    assert batch.activation_bytes == batch.activations.bytes_of(samples) > 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sequence": 0}, "--sequence is 0; give 1 or more"),
        ({"micro_batch": 0}, "--micro-batch is 0; give 1 or more"),
        ({"sequence": None, "micro_batch": 1}, "--micro-batch needs --sequence"),
        ({"sequence": None, "memory": "1GB"}, "--memory needs --sequence"),
    ],
)
def test_options_are_positive_and_need_a_sequence(given: dict[str, Any], words: str) -> None:
    with pytest.raises(CommandLineError, match=words):
        batch_of({"train_micro_batch_size_per_gpu": 1}, **given)


def test_activations_of_a_divided_model_are_unknown() -> None:
    ranks = Topology(world_size=4, pipeline_parallel=2)

    batch = batch_of({"train_micro_batch_size_per_gpu": 1}, ranks)

    assert (batch.activations, batch.activation_bytes) == (None, 0)
    assert batch.unknown == "not modeled with tensor or pipeline parallelism"


AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}


@pytest.mark.parametrize(
    ("dtype", "bf16", "fp16"),
    [("bf16", True, False), ("fp16", False, True), ("fp32", False, False)],
)
def test_each_auto_gets_the_value_of_hugging_face(dtype: str, bf16: bool, fp16: bool) -> None:
    filled, values = fill_in(
        AUTO, TrainingValues(accumulation=3, micro_batch=5, dtype=dtype), SMALL
    )

    expected = {
        "gradient_accumulation_steps": 3,
        "train_micro_batch_size_per_gpu": 5,
        "bf16.enabled": bf16,
        "fp16.enabled": fp16,
        "gradient_clipping": 1.0,
        "zero_optimization.reduce_bucket_size": 768 * 768,
        "zero_optimization.stage3_prefetch_bucket_size": 530_841,  # 0.9 of it
        "zero_optimization.stage3_param_persistence_threshold": 7680,
    }
    assert values == expected
    assert filled["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 589_824,
        "stage3_prefetch_bucket_size": 530_841,
        "stage3_param_persistence_threshold": 7680,
    }
    assert AUTO["gradient_clipping"] == "auto"  # the given one is unchanged


@pytest.mark.parametrize(
    ("config", "bucket"),
    [
        ({"hidden_size": 10}, 100),
        ({"hidden_sizes": [4, 12, 8]}, 144),
        ({"text_config": SimpleNamespace(hidden_size=7)}, 49),
        ({"other": 1}, None),
    ],
)
def test_the_hidden_size_of_a_model_is_that_of_its_config(
    config: dict[str, Any], bucket: int | None
) -> None:
    module: Any = SimpleNamespace(config=SimpleNamespace(**config))
    model = EstimatedModel(shape=SMALL.shape, module=module)

    _, values = fill_in(AUTO, TrainingValues(), model)

    assert values.get("zero_optimization.reduce_bucket_size") == bucket


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"accumulation": 2}, '--grad-accum 2: the configuration has no "auto" at gradient_acc'),
        ({"dtype": "fp16"}, '--dtype fp16: the configuration has no "auto" at fp16.enabled;'),
        (
            {"dtype": "fp32"},
            'no "auto" at bf16.enabled or bfloat16.enabled or fp16.enabled; leave',
        ),
    ],
)
def test_an_option_without_an_auto_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(CommandLineError, match=words):
        fill_in({"bf16": {"enabled": True}}, TrainingValues(**given), SMALL)
