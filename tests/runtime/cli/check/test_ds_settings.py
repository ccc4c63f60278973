"""Tests of the check of a ds config: batch sizes, and settings that do harm.

Covers `ds_settings.py`; `test_planted_faults_are_named.py` has its faults in the whole command.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from zerowatch.runtime.cli.check.ds_settings import check_ds_config
from zerowatch.runtime.cli.check.verdicts import Job, Verdict


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def found(
    folder: Path, config: object, *, world_size: int | None = None
) -> list[tuple[Verdict, str, str]]:
    """The findings on a ds config, without its path."""
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    job = Job(ds_config=str(path), world_size=world_size)
    return [
        (each.verdict, each.text.removeprefix(f"{path}: "), each.advice)
        for each in check_ds_config(job)
    ]


ACCEPTED = (Verdict.OK, "DeepSpeed accepts it; no setting in it is known to do harm", "")


@pytest.mark.parametrize(
    ("batch", "ranks", "parts"),
    [
        ((24, None, None), 4, None),
        ((24, 2, 3), 4, None),
        ((24, 2, None), 4, None),
        ((24, None, 3), 4, None),
        ((None, 2, 3), 4, None),
        ((24, 2, 3), None, None),
        ((26, None, None), 4, "26 is not micro-batch size x accumulation steps x 4 ranks (here any "
         "x any x 4)"),
        ((48, 2, 3), 4, "48 is not micro-batch size x accumulation steps x 4 ranks (here 2 x 3 x "
         "4)"),
        ((24, 5, None), 4, "24 is not micro-batch size x accumulation steps x 4 ranks (here 5 x any"
         " x 4)"),
        ((24, None, 5), 4, "24 is not micro-batch size x accumulation steps x 4 ranks (here any x 5"
         " x 4)"),
    ],
)  # fmt: skip
def test_the_batch_is_the_product_of_its_parts(
    tmp_path: Path, batch: tuple[int | None, ...], ranks: int | None, parts: str | None
) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {key: size for key, size in zip(keys, batch, strict=True) if size is not None}

    expected = (Verdict.FAILED, f"train_batch_size {parts}", "change one of them")
    assert found(tmp_path, config, world_size=ranks) == [expected if parts else ACCEPTED]


@pytest.mark.parametrize("size", [0, -1, True, 2.5, "4"])
def test_a_batch_size_is_a_whole_number_from_one_on(tmp_path: Path, size: object) -> None:
    assert found(tmp_path, {"train_micro_batch_size_per_gpu": size})[0] == (
        Verdict.FAILED,
        f"train_micro_batch_size_per_gpu is {size!r}",
        "give a whole number, 1 or more",
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"gradient_accumulation_steps": 2},
            "neither train_batch_size nor train_micro_batch_size_per_gpu is given",
        ),
        (
            {"train_batch_size": 7, "tensor_parallel": {"autotp_size": 2}},
            None,  # it is divided by fewer ranks
        ),
    ],
)
def test_a_batch_needs_a_size_and_is_not_judged_where_the_model_is_divided(
    tmp_path: Path, config: dict[str, Any], expected: str | None
) -> None:
    texts = [text for _, text, _ in found(tmp_path, config, world_size=4)]

    assert texts == [expected or ACCEPTED[1]]


@pytest.mark.parametrize(
    ("bucket", "number"),
    [(100_000, 0), (99_999, 1), (1, 1), (0, 0), (5e8, 0)],
)
def test_a_bucket_of_less_than_a_hundred_thousand_gradients_is_named(
    tmp_path: Path, bucket: float, number: int
) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": bucket},
    }

    warnings = [each for each in found(tmp_path, config) if each[0] == Verdict.WARNING]

    assert len(warnings) == number
    assert all(f"reduce_bucket_size {bucket:g} makes" in text for _, text, _ in warnings)


@pytest.mark.parametrize(
    ("block", "advice"),
    [
        ({"comms_logger": {"enabled": True}}, 'remove "comms_logger"; zerowatch measures without'),
        ({"flops_profiler": {"enabled": True}}, 'remove "flops_profiler"; zerowatch publishes'),
        ({"wall_clock_breakdown": True}, 'remove "wall_clock_breakdown"; zerowatch measures'),
        ({"memory_breakdown": True}, 'remove "memory_breakdown"; zerowatch publishes memory'),
        ({"comms_logger": {"enabled": False}}, None),
        ({"memory_breakdown": False}, None),
    ],
)
def test_a_setting_that_slows_down_each_step_has_its_advice(
    tmp_path: Path, block: dict[str, Any], advice: str | None
) -> None:
    [(verdict, _, given)] = found(tmp_path, {"train_micro_batch_size_per_gpu": 4, **block})

    assert verdict == (Verdict.OK if advice is None else Verdict.WARNING)
    assert given.startswith(advice or "")


def test_each_auto_is_named_in_order(tmp_path: Path) -> None:
    config = {
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }

    [(verdict, text, _)] = found(tmp_path, config)

    assert verdict == Verdict.OK
    assert text.startswith(
        '"auto" at bf16.enabled, train_batch_size, zero_optimization.reduce_bucket_size: '
    )


def test_a_missing_file_and_other_content_are_named(tmp_path: Path) -> None:
    missing = [each.text for each in check_ds_config(Job(ds_config=f"{tmp_path}/none.json"))]
    [none] = check_ds_config(Job())

    assert missing == [f"{tmp_path}/none.json: no such file"]
    assert none.verdict == Verdict.NOT_APPLICABLE
    assert found(tmp_path, [1])[0][1] == f"{tmp_path}/ds.json must hold one JSON object"


@pytest.mark.parametrize("name", ["offload_param", "offload_optimizer"])
def test_the_folder_of_offload_to_nvme_must_be_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def texts(folder: object, device: str = "nvme") -> list[str]:
        block = {"device": device, "nvme_path": folder}
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 3, name: block},
        }
        return [text for _, text, _ in found(tmp_path, config) if "nvme_path" in text]

    (tmp_path / "file").touch()
    in_the_way = str(tmp_path / "file" / "swap")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) == tmp_path)

    for folder in (in_the_way, "/nowhere/swap"):
        assert texts(folder) == [
            f"zero_optimization.{name}.nvme_path {folder!r} is not a writable folder"
        ]
    assert texts(None) and texts("/nowhere", "cpu") == []
    assert texts(str(tmp_path)) == []
    assert texts(str(tmp_path / "job-1" / "swap")) == []  # DeepSpeed creates it
