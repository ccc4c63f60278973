"""Tests of the memory that `estimate` prints: activations, peak, largest micro-batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zerowatch.__main__ import main

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 2},
}
SIZE = ("--world", 8, "--params", "7B")
OWN = ("--world", 8, "--model", "zerowatch.runtime.cli.demo.model:ByteGpt")


@pytest.fixture
def estimate(monkeypatch, capsys, tmp_path) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: object, config: dict = DS_CONFIG) -> tuple[int, str, str]:
        ds_json = tmp_path / "ds.json"
        ds_json.write_text(json.dumps(config))
        command = ["zerowatch", "estimate", ds_json, *arguments]
        monkeypatch.setattr(sys, "argv", [str(word) for word in command])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def words(out: str) -> str:
    return " ".join(out.split())


def estimates(out: str) -> list[dict]:
    return json.loads(out)["estimates"]


def test_without_a_sequence_activations_are_not_included(estimate):
    _, out, _ = estimate(*SIZE)

    assert "in training, without activations" in out
    assert "Activations are not included; add --sequence" in out


def test_with_a_sequence_activations_have_a_column_and_count_in_the_peak(estimate):
    _, without, _ = estimate(*SIZE, "--json")
    _, out, _ = estimate(*SIZE, "--sequence", 4096, "--json")
    _, table, _ = estimate(*SIZE, "--sequence", 4096)

    peaks = [one["peak"]["device_bytes"] for one in estimates(out)]
    assert all(
        more > less["peak"]["device_bytes"]
        for more, less in zip(peaks[1:], estimates(without)[1:], strict=True)
    )
    assert "micro-batches of 2 x 4,096 tokens" in table
    assert " activations " in table


def test_the_effect_of_activation_checkpointing_is_shown(estimate):
    _, out, _ = estimate(*SIZE, "--sequence", 4096, "--memory", "80GiB", "--stage", 2)

    assert "fits in 80.0 GiB: stage 2: 3." in words(out)
    assert "With activation checkpointing of each layer: stage 2: 20." in words(out)
    assert "With activation checkpointing of each layer, activations need 5.61 GiB" in words(out)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_block_of_activation_checkpointing_recomputes_nothing(estimate, stage):
    """DeepSpeed reads the block, and checkpoints only what the model asks it to."""
    block = {"activation_checkpointing": {"partition_activations": False}}
    arguments = (*SIZE, "--sequence", 4096, "--memory", "80GiB", "--stage", stage)

    with_block, without = (
        estimate(*arguments, config={**DS_CONFIG, **config}) for config in (block, {})
    )

    assert with_block == without


def test_the_micro_batch_defaults_to_that_of_the_configuration(estimate):
    _, own, _ = estimate(*SIZE, "--sequence", 128, "--json")
    _, given, _ = estimate(*SIZE, "--sequence", 128, "--micro-batch", 6, "--json")

    batches = [json.loads(out)["batch"] for out in (own, given)]
    assert [batch["samples"] for batch in batches] == [2, 6]
    assert batches[1]["activation_bytes"] == 3 * batches[0]["activation_bytes"]


def test_the_micro_batch_is_derived_from_the_total_batch(estimate):
    config = {**DS_CONFIG, "train_batch_size": 64, "gradient_accumulation_steps": 2}
    del config["train_micro_batch_size_per_gpu"]

    _, out, _ = estimate(*SIZE, "--sequence", 128, "--json", config=config)

    assert json.loads(out)["batch"]["samples"] == 4


def test_the_largest_micro_batch_fits_and_one_more_sample_does_not(estimate):
    options = (*SIZE, "--sequence", 2048, "--stage", 3, "--json")
    _, out, _ = estimate(*options, "--memory", "80GiB")
    (found,) = estimates(out)

    peaks = [
        estimates(estimate(*options, "--micro-batch", size)[1])[0]["peak"]["device_bytes"]
        for size in (found["largest_micro_batch"], found["largest_micro_batch"] + 1)
    ]

    assert peaks[0] <= 80 * 2**30 < peaks[1]


def test_a_stage_that_does_not_fit_is_named(estimate):
    _, out, _ = estimate(*SIZE, "--sequence", 2048, "--memory", "24GB")

    assert "that fits in 22.4 GiB: stage 0: none" in words(out)


def test_activations_of_a_real_model_are_traced(estimate):
    code, out, err = estimate(*OWN, "--sequence", 128)

    assert (code, err) == (0, "")
    assert "micro-batches of 2 x 128 tokens" in out
    assert "?" not in out


def test_a_model_that_takes_no_token_ids_has_a_plan_without_activations(estimate):
    model = ("--world", 8, "--model", "scripts.estimator.traffic_cases:deep")

    code, out, _ = estimate(*model, "--sequence", 7)

    assert code == 0
    assert "Activations are unknown: a forward and backward pass on token ids fails" in words(out)


def test_activations_with_tensor_parallelism_are_unknown(estimate):
    _, out, _ = estimate(*SIZE, "--tp", 2, "--sequence", 128)

    assert "Activations are unknown: not modeled with tensor or pipeline" in words(out)


@pytest.mark.parametrize("config", [{}, {"offload_optimizer": {"device": "nvme"}}])
def test_the_widest_table_fits_in_98_columns(estimate, config):
    zero = {"stage": 3, "offload_param": {"device": "nvme"}, **config}
    given = {**DS_CONFIG, "zero_optimization": zero}
    size = ("--world", 64, "--params", "175B", "--sequence", 4096, "--micro-batch", 64)

    _, out, _ = estimate(*size, config=given)

    assert max(len(line) for line in out.splitlines()[1:]) <= 98
    assert "..." not in out


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--sequence", 0), "--sequence is 0; give 1 or more"),
        (("--sequence", 8, "--micro-batch", 0), "--micro-batch is 0; give 1 or more"),
        (("--micro-batch", 4), "--micro-batch needs --sequence"),
        (("--memory", "80GiB"), "--memory needs --sequence"),
        (("--sequence", 8, "--memory", "much"), "--memory much is not a size"),
        (("--sequence", 8, "--memory", "80"), "--memory 80 is not a size"),
        (("--sequence", 8, "--memory", "-1GB"), "--memory -1GB is not a size"),
    ],
)
def test_invalid_memory_options_print_one_line_and_exit_with_code_2(estimate, arguments, fault):
    code, out, err = estimate(*SIZE, *arguments)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert fault in err


def test_an_auto_micro_batch_requires_the_option(estimate):
    config = {
        **DS_CONFIG,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
    }

    code, _, err = estimate(*SIZE, "--sequence", 128, config=config)

    assert code == 2
    assert "give --micro-batch" in err


def test_planning_activations_of_a_size_loads_neither_torch_nor_deepspeed(tmp_path: Path):
    from scripts.launching import plain

    ds_json = tmp_path / "ds.json"
    ds_json.write_text(json.dumps(DS_CONFIG))
    program = (
        "import sys; from zerowatch.__main__ import commands;"
        f"commands(['estimate', {str(ds_json)!r}, '--world', '8', '--params', '7B', '--sequence',"
        " '2048', '--memory', '80GiB'], standalone_mode=False);"
        "assert not {'torch', 'deepspeed'} & set(sys.modules)"
    )

    finished = plain("-c", program)

    assert finished.returncode == 0, finished.stderr
