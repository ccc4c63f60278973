"""Tests of the messages about a DeepSpeed configuration that DeepSpeed rejects."""

from __future__ import annotations

import base64
import gc
import json
import logging
import warnings
from pathlib import Path

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import get_zero_config

from zerowatch.errors import DsConfigError, SettingsError
from zerowatch.runtime.common.ds_config import (
    config_origin,
    file_fault,
    merged,
    parse_text,
    read_config,
    read_zerowatch_block,
    training_config,
    zero_stage,
)
from zerowatch.runtime.common.ds_config_errors import (
    ConfigErrors,
    explain_config_error,
    misspelled_keys,
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


MICRO_BATCH = "train_micro_batch_size_per_gpu"


def test_a_training_run_changes_only_what_the_engine_would_decide() -> None:
    given = {
        MICRO_BATCH: 3,
        "train_batch_size": 24,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 5},
        "optimizer": {"type": "Adam"},
    }
    before = json.dumps(given)

    ours = training_config(given)

    assert ours == {
        MICRO_BATCH: 3,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_optimization": {"stage": 1, "overlap_comm": False, "reduce_bucket_size": 5},
        "optimizer": {"type": "Adam"},
    }
    ours["optimizer"]["type"] = "SGD"
    assert json.dumps(given) == before


@pytest.mark.parametrize(("stage", "overlaps"), [(0, False), (1, False), (2, True), (3, True)])
def test_overlap_is_kept_from_stage_two_on(stage: int, overlaps: bool) -> None:
    config = {MICRO_BATCH: 1, "zero_optimization": {"stage": stage, "overlap_comm": True}}

    assert training_config(config)["zero_optimization"]["overlap_comm"] is overlaps


@pytest.mark.parametrize(
    ("stage", "enabled", "candidate", "level"),
    [
        (0, True, False, logging.WARNING),
        (0, True, True, logging.DEBUG),
        (0, False, False, None),
        (1, True, False, None),
    ],
)
def test_fp16_at_stage_zero_is_warned_of(
    caplog: pytest.LogCaptureFixture, stage: int, enabled: bool, candidate: bool, level: int | None
) -> None:
    caplog.set_level(logging.DEBUG)
    config = {
        MICRO_BATCH: 1,
        "zero_optimization": {"stage": stage},
        "fp16": {"enabled": enabled},
    }

    training_config(config, is_candidate=candidate)

    found = [record.levelno for record in caplog.records if "fp16 at ZeRO stage 0" in record.msg]
    assert found == ([] if level is None else [level])


@pytest.mark.parametrize(
    ("sizes", "fault"),
    [
        ({MICRO_BATCH: size}, f"{MICRO_BATCH} must be a whole number of samples, 1 or more, got ")
        for size in (0, -1, 1.5, True, "auto")
    ]
    + [
        ({"a": 1}, f"{MICRO_BATCH} must be a whole number of samples, 1 or more, got None"),
        ({"train_batch_size": 8}, f"give {MICRO_BATCH}, the samples of the first micro-batches; "),
        ({"train_batch_size": "auto"}, f"{MICRO_BATCH} must be a whole number of samples, 1 or "),
    ],
    ids=str,
)
def test_a_micro_batch_is_a_whole_number_of_samples(sizes: dict[str, object], fault: str) -> None:
    with pytest.raises(DsConfigError) as caught:
        training_config(sizes)

    assert str(caught.value).startswith(f"DeepSpeed configuration: {fault}")
    assert training_config({MICRO_BATCH: 1})[MICRO_BATCH] == 1


def test_changes_are_merged_into_blocks_and_replace_other_values() -> None:
    config = {"a": {"b": 1, "c": {"d": 2}}, "e": 3, "f": {"g": 4}}
    changes = {"a": {"c": {"h": 5}, "b": {"i": 6}}, "f": 7, "j": {"k": 8}}

    result = merged(config, changes)

    assert result == {
        "a": {"b": {"i": 6}, "c": {"d": 2, "h": 5}},
        "e": 3,
        "f": 7,
        "j": {"k": 8},
    }
    result["j"]["k"] = result["a"]["c"]["d"] = 0
    assert (config["a"], changes["j"]) == ({"b": 1, "c": {"d": 2}}, {"k": 8})


def test_a_configuration_is_also_read_from_base64_and_from_a_path(tmp_path: Path) -> None:
    text = '{"fp16": {"enabled": true},}'
    (tmp_path / "ds.json").write_text(text)

    for config in (base64.urlsafe_b64encode(text.encode()).decode(), tmp_path / "ds.json"):
        assert read_config(config) == {"fp16": {"enabled": True}}
    assert read_config(tmp_path / "none.json") == {}
    assert read_config(base64.urlsafe_b64encode(b"[1]").decode()) == {}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[" * 100_000, "objects or lists are nested too deeply"),
        ("{a: 1e400}", "a number is too large"),
        ('{"a": 1, "b": 2, "a": 3}', "the same key twice: 'a'; DeepSpeed refuses that"),
    ],
    ids=["deep", "large", "twice"],
)
def test_a_text_that_deepspeed_refuses_is_an_error(text: str, fault: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_text(text, unique_keys=True)

    assert str(caught.value) == fault


def test_of_a_key_that_is_there_twice_the_last_counts_if_that_is_allowed() -> None:
    assert parse_text('{"a": 1, "a": 3}') == {"a": 3}
    assert parse_text('{"a": 1, "b": {"a": 3}}', unique_keys=True) == {"a": 1, "b": {"a": 3}}


def test_a_file_without_a_fault_has_none(ds_json) -> None:
    assert file_fault(ds_json({"fp16": {}})) is None
    assert file_fault({"fp16": {}}) is None
    assert file_fault(7) == "DeepSpeed takes a str or a dict here, got a int"


def test_a_file_that_is_no_text_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_bytes(b"\xff\xfe")

    fault = file_fault("ds.json")

    assert fault is not None and fault.startswith("not a text file: 'utf-8' codec can't decode")


def test_the_file_of_a_dict_is_found_by_its_content(ds_json, monkeypatch) -> None:
    path = ds_json({"fp16": {}, "bf16": {}})
    monkeypatch.setattr("sys.argv", ["train.py", path])
    Path("empty.json").write_text("{}")
    named = [config_origin({"fp16": {}, "bf16": {}, "more": 1}), config_origin({"fp16": {}})]
    monkeypatch.setattr("sys.argv", ["train.py", "empty.json"])
    named.append(config_origin({"fp16": {}, "bf16": {}}))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", path)
    named.append(config_origin({"fp16": {}, "bf16": {}}))

    general = "DeepSpeed configuration"
    assert named == ["ds.json", general, general, "ds.json"]
    assert config_origin(Path("x.json")) == "x.json"


@pytest.mark.parametrize(("padding", "is_found"), [(0, True), (1, False)])
def test_a_file_of_more_than_one_mib_is_no_configuration(
    ds_json, monkeypatch, padding: int, is_found: bool
) -> None:
    text = '{"fp16": {}}'
    path = ds_json(text + " " * (2**20 - len(text) + padding))
    monkeypatch.setattr("sys.argv", ["train.py", path])

    assert (config_origin({"fp16": {}}) == "ds.json") is is_found


def reader_that_raises(error: BaseException, name: str) -> BaseException:
    """Raise an error in a function whose qualified name is that of one of DeepSpeed's."""

    def read() -> None:
        raise error

    read.__code__ = read.__code__.replace(co_qualname=name)
    with pytest.raises(BaseException) as caught:
        read()
    return caught.value


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("_do_sanity_check", "optimizer.type: bad value"),
        ("_configure_basic_optimizer", "optimizer.params: bad value"),
        ("_do_optimizer_sanity_check", "zero_allow_untested_optimizer: bad value"),
        ("_scheduler_from_config", "scheduler.type: bad value"),
        ("step", None),
    ],
)
def test_an_error_that_the_engine_raises_itself_is_about_its_key(
    function: str, line: str | None
) -> None:
    error = ValueError("bad value\nand more lines")

    found = explain_config_error(
        reader_that_raises(error, f"DeepSpeedEngine.{function}"), {"fp16": {}}
    )

    assert found == (None if line is None else f"DeepSpeed configuration: {line}")


def test_an_interrupt_while_a_configuration_is_read_is_not_explained() -> None:
    interrupt = reader_that_raises(KeyboardInterrupt(), "load_ds_config")
    error = reader_that_raises(RuntimeError("odd"), "load_ds_config")

    assert explain_config_error(interrupt, {"fp16": {}}) is None
    assert explain_config_error(error, {"fp16": {}}) == "DeepSpeed configuration: odd"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"fp16": {}, "scheduler": [1]}, "'scheduler' must be an object, got [1]"),
        ({"train_batch_size": 4, MICRO_BATCH: "x"}, f"'{MICRO_BATCH}' must be an integer, got 'x'"),
        (
            {"gradient_accumulation_steps": 1.5},
            "'gradient_accumulation_steps' must be an integer, ",
        ),
        ({"bf16": {}}, "odd"),
    ],
)
@pytest.mark.parametrize("kind", [TypeError, AttributeError])
def test_a_value_of_a_wrong_type_is_named(
    content: dict[str, object], said: str, kind: type[Exception]
) -> None:
    error = reader_that_raises(kind("odd"), "DeepSpeedConfig.__init__")

    line = explain_config_error(error, content)

    assert line is not None and line.startswith(f"DeepSpeed configuration: {said}")


def test_an_explained_error_is_raised_with_its_explanation_or_as_ours() -> None:
    def fail() -> None:
        raise ValueError("bad value")

    fail.__code__ = fail.__code__.replace(co_qualname="load_ds_config")
    with pytest.raises(ValueError) as theirs, ConfigErrors({"fp16": {}}, FailOpen()):
        fail()
    with (
        pytest.raises(DsConfigError) as ours,
        ConfigErrors({"fp16": {}}, FailOpen(), raise_ours=True),
    ):
        fail()

    line = "DeepSpeed configuration: bad value"
    assert theirs.value.zerowatch_explanation == line  # type: ignore[attr-defined]
    assert str(ours.value) == line
    assert isinstance(ours.value.__cause__, ValueError)


def test_other_errors_are_raised_as_they_are() -> None:
    error = ModuleNotFoundError("No module named 'apex'", name="apex")

    with (
        pytest.raises(ModuleNotFoundError) as caught,
        ConfigErrors({}, FailOpen(), raise_ours=True),
    ):
        raise error
    with ConfigErrors({}, FailOpen(), raise_ours=True):
        pass

    assert caught.value is error
    assert not hasattr(error, "__notes__") and not hasattr(error, "zerowatch_explanation")


def test_each_nearly_right_key_is_named_with_the_key_that_it_resembles() -> None:
    keys = ("optimiser", "fp16", "gradient_cliping", "my_own", "steps_per_prints")

    assert list(misspelled_keys(dict.fromkeys(keys, 1))) == [
        ("optimiser", "optimizer"),
        ("gradient_cliping", "gradient_clipping"),
        ("steps_per_prints", "steps_per_print"),
    ]


@pytest.mark.parametrize(
    ("config", "stage"), [({}, 0), ({"zero_optimization": {}}, 0), ({"zero_optimization": True}, 1)]
)
def test_without_a_number_the_stage_is_zero_or_for_true_one(config, stage: int) -> None:
    assert zero_stage(config) == stage
