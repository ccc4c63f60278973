"""Tests of the ds config in the run folder; covers `ds_config_file.py` and `hidden_secrets.py`."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import torch

from zerowatch.runtime.common.retried_files import RetriedFiles
from zerowatch.runtime.monitor.ds_config_file import DS_CONFIG_FILE, write_ds_config


def written(folder: Path, config: Any) -> dict[str, Any]:
    write_ds_config(folder, SimpleNamespace(config=config), RetriedFiles())
    content: dict[str, Any] = json.loads((folder / DS_CONFIG_FILE).read_text())
    return content


def test_the_ds_config_is_written_without_secrets_and_for_the_owner_only(tmp_path: Path) -> None:
    config = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1e6},
        "monitor": [{"comet": {"api_key": "abc", "project": "llm"}}],
        "max_token": 512,
        "zerowatch": {"tuner": {"mode": "auto"}},
    }

    content = written(tmp_path, config)

    assert content["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1e6}
    assert content["monitor"][0]["comet"] == {"api_key": "(not recorded)", "project": "llm"}
    assert content["max_token"] == 512
    assert "zerowatch" not in content
    mode = (tmp_path / DS_CONFIG_FILE).stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


@pytest.mark.parametrize(
    "secret",
    [
        {"apiKey": "s3cret"},
        {"api-key": "s3cret"},
        {"hub_tokens": ["s3cret"]},
        {"WANDB_API_KEY": "s3cret"},
        {"private_key_pem": "s3cret"},
        {"passwd": "s3cret"},
        {"credentials": {"user": "ann", "secret": "s3cret"}},
        {"headers": {"Authorization": "Bearer s3cret"}},
        {"header": "Authorization: Bearer s3cret"},
        {"url": "https://ann:s3cret@host/path"},
    ],
)
def test_a_secret_is_recognized_by_its_name_or_its_form(
    tmp_path: Path, secret: dict[str, Any]
) -> None:
    content = written(tmp_path, {"train_batch_size": 8, "monitor": secret})

    assert "s3cret" not in json.dumps(content)
    assert "(not recorded)" in json.dumps(content)


def test_names_with_such_words_inside_are_no_secrets(tmp_path: Path) -> None:
    config = {"tokenizer": "gpt2", "monkey": "x", "keyboard": "y", "author": "ann", "path": "/a"}

    assert written(tmp_path, config) == config


def test_numbers_that_json_does_not_have_are_written_as_text(tmp_path: Path) -> None:
    write_ds_config(
        tmp_path, SimpleNamespace(config={"a": float("inf"), "b": [float("nan")]}), RetriedFiles()
    )

    text = (tmp_path / DS_CONFIG_FILE).read_bytes()
    assert orjson.loads(text) == {"a": "Infinity", "b": ["NaN"]}


def test_a_config_given_as_a_path_is_written_as_deepspeed_has_read_it(tmp_path: Path) -> None:
    engine = SimpleNamespace(
        config="ds.json", _config=SimpleNamespace(_param_dict={"train_batch_size": 8})
    )

    write_ds_config(tmp_path, engine, RetriedFiles())

    assert json.loads((tmp_path / DS_CONFIG_FILE).read_text()) == {"train_batch_size": 8}


def test_values_that_are_not_json_are_written_as_text(tmp_path: Path) -> None:
    assert written(tmp_path, {"dtype": torch.bfloat16}) == {"dtype": "torch.bfloat16"}


def test_without_deepspeed_there_is_no_file(tmp_path: Path) -> None:
    write_ds_config(tmp_path, SimpleNamespace(config={}), RetriedFiles())

    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_logged_and_does_not_raise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()

    write_ds_config(
        tmp_path / "file", SimpleNamespace(config={"train_batch_size": 8}), RetriedFiles()
    )

    assert "cannot write" in caplog.text
