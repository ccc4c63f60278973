"""Tests of the messages about a DeepSpeed configuration that DeepSpeed rejects."""

from __future__ import annotations

import gc
import json
import warnings
from pathlib import Path

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import get_zero_config

from zerowatch.errors import DsConfigError, SettingsError
from zerowatch.runtime.common.ds_config import read_zerowatch_block, training_config, zero_stage
from zerowatch.runtime.common.ds_config_errors import (
    ConfigErrors,
    explain_config_error,
    warn_of_misspelled_keys,
)
from zerowatch.runtime.common.fail_open import FailOpen

pytestmark = [
    # DeepSpeed leaves the file that it reads open.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.usefixtures("frozen_imports"),
]


def explain(config):
    """Let DeepSpeed read a configuration, and return what we say of its error."""
    with pytest.raises(Exception) as caught:  # whatever DeepSpeed raises
        DeepSpeedConfig(config)
    line = explain_config_error(caught.value, config)
    with warnings.catch_warnings():  # DeepSpeed leaves the file open in the frames of its error
        warnings.simplefilter("ignore", ResourceWarning)
        del caught
        gc.collect()
    return line


@pytest.fixture
def ds_json(tmp_path, monkeypatch):
    """Return a function that writes ds.json in the working folder and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(content):
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "ds.json").write_text(text)
        return "ds.json"

    return write


def test_a_missing_file_is_named_with_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    line = explain("ds.json")

    assert line == f"ds.json: no such file in {tmp_path}; check the path given to DeepSpeed"


def test_a_folder_given_as_the_file_is_named(tmp_path):
    assert explain(str(tmp_path)) == f"{tmp_path}: cannot be read: Is a directory; give a JSON file"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"train_batch_size": 4 "fp16": {}}', "line 1, column 24: Expecting ',' delimiter"),
        ('{\n  "fp16": {"enabled": True}\n}', "line 2, column 23: Expecting value"),
        ('{\n  "train_batch_size": 4,\n', "line 3, column 1"),
        ('{\n  # ours\n  "a" 4\n}', "line 3, column 7: Expecting ':' delimiter"),
    ],
)
def test_invalid_json_is_located(ds_json, text, place):
    line = explain(ds_json(text))

    assert line.startswith(f"ds.json: not valid JSON at {place}")


def test_json_that_is_not_an_object_is_refused(ds_json):
    assert explain(ds_json("hello")) == "ds.json: must hold one JSON object, { ... }"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"zero_optimization": {"stge": 1}},
            "unknown key 'zero_optimization.stge'; did you mean 'stage'?",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}},
            "unknown key 'zero_optimization.offload_optimizer.devise'; did you mean 'device'?",
        ),
        (
            {"fp16": {"zzz": 1}},
            "unknown key 'fp16.zzz'; remove it, or look it up in DeepSpeed's manual",
        ),
        (
            {"zero_optimization": {"stage": 7}},
            "zero_optimization.stage: Input should be 0, 1, 2 or 3, got 7",
        ),
        ({"fp16": 3}, "'fp16' must be an object, got 3"),
        ({"train_batch_size": "auto"}, "'train_batch_size' must be an integer, got 'auto'"),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "bfloat16 and fp16 modes cannot be simultaneously enabled",
        ),
    ],
)
def test_a_key_is_named_with_its_block_and_what_to_do(ds_json, config, said):
    line = explain(ds_json({"train_batch_size": 2, **config}))

    assert line == f"ds.json: {said}"


def test_a_duplicate_key_is_named(ds_json):
    line = explain(ds_json('{"train_batch_size": 4, "train_batch_size": 8}'))

    assert line == "ds.json: Duplicate keys in DeepSpeed config: ['train_batch_size']"


def test_the_file_of_a_dict_is_found_among_the_scripts_arguments(ds_json, monkeypatch):
    content = {"train_batch_size": 2, "zero_optimization": {"stge": 1}}
    monkeypatch.setattr("sys.argv", ["train.py", "--lr=1", f"--deepspeed={ds_json(content)}"])

    line = explain(content | {"steps_per_print": 10})  # as Hugging Face adds its own

    assert line.startswith("ds.json: unknown key 'zero_optimization.stge'")


def test_a_dict_without_a_file_has_a_general_name():
    assert explain({"fp16": 3, "train_batch_size": 2}).startswith("DeepSpeed configuration: 'fp16'")


def test_the_file_that_hugging_face_could_not_read_is_named(ds_json):
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    with pytest.raises(ValueError) as caught:
        HfDeepSpeedConfig(ds_json('{"fp16": {},}'))  # DeepSpeed itself would take the comma

    line = explain_config_error(caught.value, None)
    assert line.startswith("ds.json: not valid JSON at line 1, column 13")


def test_an_error_that_is_not_about_the_configuration_is_not_explained():
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 / 0

    assert explain_config_error(caught.value, {"train_batch_size": 2}) is None
    assert explain_config_error(caught.value, None) is None


def test_the_zerowatch_block_is_read_from_a_file_with_comments(ds_json):
    config = ds_json('{\n  # a comment\n  "zerowatch": {"run_id": "night"}\n}')

    assert read_zerowatch_block(config) == {"run_id": "night"}


@pytest.mark.parametrize("config", [None, {}, {"fp16": {}}, "no-such.json", 3])
def test_a_configuration_without_a_readable_block_has_no_settings(config):
    assert read_zerowatch_block(config) == {}


def test_a_block_that_is_not_an_object_is_a_wrong_setting():
    with pytest.raises(SettingsError, match="must be an object of settings, got 5"):
        read_zerowatch_block({"zerowatch": 5})


def test_a_misspelled_top_level_key_is_logged_with_a_suggestion(ds_json, caplog):
    path = ds_json({"train_batch_size": 1, "zero_optimisation": {"stage": 2}, "my_own": 1})

    warn_of_misspelled_keys(path)

    assert [entry.getMessage() for entry in caplog.records] == [
        "ds.json: DeepSpeed does not know the key 'zero_optimisation' and ignores it; "
        "did you mean 'zero_optimization'?"
    ]


def test_keys_of_deepspeed_and_ours_are_not_logged(ds_json, caplog):
    keys = ("zero_optimization", "bf16", "gradient_clipping", "flops_profiler", "zerowatch")

    warn_of_misspelled_keys(ds_json({key: {} for key in keys}))

    assert caplog.records == []


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ("missing.json", "missing.json: no such file"),
        (Path("missing.json"), "missing.json: no such file"),
        (".", ".: cannot be read: Is a directory"),
        ("ds.json", "ds.json: not valid JSON at line 1"),
        (7, "config must be a ds config as a dict, or the path of a JSON file, got 7"),
        (None, "config must be a ds config as a dict, or the path of a JSON file, got None"),
        ({}, "DeepSpeed configuration: is empty"),
    ],
    ids=str,
)
def test_a_configuration_that_a_training_run_cannot_read_is_explained(ds_json, config, fault):
    ds_json("{'a' 3")

    with pytest.raises(DsConfigError) as caught:
        training_config(config)

    assert str(caught.value).startswith(fault)


def test_only_a_config_that_is_used_logs_what_is_changed_in_it(caplog):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1, "overlap_comm": True},
    }

    candidate = training_config(config, is_candidate=True)
    before = [record for record in caplog.records if record.levelname == "WARNING"]
    used = training_config(config)

    assert before == []
    assert candidate == used
    assert "overlap_comm disabled" in caplog.text


@pytest.mark.parametrize("stage", ["x", [1], None, 7, -1, float("inf")], ids=repr)
def test_a_zero_stage_that_does_not_exist_is_refused(stage):
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}

    with pytest.raises(DsConfigError) as caught:
        training_config(config)

    start = "DeepSpeed configuration: zero_optimization.stage must be 0, 1, 2 or 3, got "
    assert str(caught.value) == f"{start}{stage!r}"


@pytest.mark.parametrize("zero", [{"stage": "2"}, {"stage": 1.0}, {"stage": True}, True, False, {}])
def test_the_zero_stage_is_read_as_deepspeed_reads_it(zero):
    expected = get_zero_config({"zero_optimization": zero}).stage

    assert zero_stage({"zero_optimization": zero}) == expected


def test_a_start_without_a_launcher_says_what_to_set():
    with pytest.raises(ModuleNotFoundError) as caught, ConfigErrors({}, FailOpen()):
        raise ModuleNotFoundError("No module named 'mpi4py'", name="mpi4py")  # as DeepSpeed does

    (note,) = caught.value.__notes__
    assert "MASTER_PORT" in note and "zerowatch run" in note
