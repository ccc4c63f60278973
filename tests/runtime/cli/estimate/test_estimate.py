"""Tests of the command `estimate`: output and errors.

Covers `estimate/command.py`, `estimate/inputs.py` and `estimate/auto_values.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from zerowatch.__main__ import main
from zerowatch.runtime.cli.estimate.inputs import read_model

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 2, "reduce_scatter": True, "allgather_bucket_size": 2e8},
}
SIZE = ("--world", "8", "--params", "7B")


@pytest.fixture
def ds_json(tmp_path: Path) -> Path:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(DS_CONFIG))
    return file


@pytest.fixture
def estimate(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["zerowatch", "estimate", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def rows(out: str, start: str) -> list[str]:
    return [" ".join(line.split()) for line in out.splitlines() if line.startswith(start)]


def test_every_stage_is_shown_and_the_configured_one_is_marked(estimate, ds_json):
    _, out, _ = estimate(ds_json, *SIZE)

    assert [bool(rows(out, f"{stage} ")) for stage in range(4)] == [True] * 4
    assert rows(out, "2 <- ")
    assert not rows(out, "1 <- ")


def test_the_total_is_followed_by_the_lower_bound_and_the_ratio(estimate, ds_json):
    _, out, _ = estimate(ds_json, *SIZE)

    totals = [line.split() for line in out.splitlines() if "total (approximate)" in line]
    assert [line[-1] for line in totals][:3] == ["1.00", "1.50", "1.80"]


def test_remarks_explain_the_all_reduce_and_name_ignored_keys(estimate, ds_json):
    _, out, _ = estimate(ds_json, *SIZE)

    text = " ".join(out.split())
    assert "all-reduce, although reduce_scatter is true" in text
    assert "allgather_bucket_size is set and has no effect" in text


def test_a_size_alone_is_estimated_as_a_typical_transformer(estimate, ds_json):
    _, out, _ = estimate(ds_json, *SIZE)

    assert "a typical transformer of 7B parameters" in out
    assert "Not exact: parameter shapes" in " ".join(out.split())


def test_plain_output_has_no_colors_and_fits_in_a_hundred_columns(estimate, ds_json):
    _, out, _ = estimate(ds_json, *SIZE, "--backend", "gloo")

    assert "\x1b" not in out
    assert max(len(line) for line in out.splitlines()[1:]) < 100


def test_one_stage_can_be_selected(estimate, ds_json):
    _, out, _ = estimate(ds_json, *SIZE, "--stage", 3)

    assert "Stage 3" in out
    assert "Stage 2" not in out


def test_json_has_the_same_plans(estimate, ds_json):
    _, out, _ = estimate(ds_json, *SIZE, "--json")

    written = json.loads(out)
    assert written["parameters"] == 7_000_000_000
    assert [one["stage"] for one in written["estimates"]] == [0, 1, 2, 3]
    assert written["estimates"][2]["volume_ratio"] == pytest.approx(1.8, rel=1e-3)
    assert written["estimates"][2]["memory"]["device_bytes"]["parameters"] == pytest.approx(1.4e10)


@pytest.mark.parametrize(
    ("size", "number"), [("1500", 1500), ("1e9", 10**9), ("125m", 125_000_000), ("1000", 1000)]
)
def test_a_size_is_a_number_with_or_without_a_unit(size, number):
    assert read_model(size, None).shape.num_parameters == number


def test_the_shapes_of_a_real_model_make_the_estimate_exact(estimate, ds_json):
    model = ("--model", "scripts.estimator.traffic_cases:frozen")

    code, out, err = estimate(ds_json, "--world", 4, *model, "--stage", 2)

    assert (code, err) == (0, "")
    assert "frozen" in out.splitlines()[0]
    assert "Calls and payload bytes are exact." in out


def test_pipeline_parallelism_omits_the_stages_that_deepspeed_rejects(estimate, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**DS_CONFIG, "zero_optimization": {"stage": 1}}))

    code, out, err = estimate(file, *SIZE, "--pp", 2, "--tp", 2)

    assert code == 0
    assert "2 data x 2 tensor x 2 pipeline" in out
    assert "Stage 1 (configured)" in out
    assert "Stage 2" not in out
    for stage in (2, 3):
        assert f"stage {stage} is left out: {file}: " in err


@pytest.mark.parametrize("stage", [2, 3])
def test_a_configured_stage_that_a_pipeline_does_not_support_is_an_error(estimate, tmp_path, stage):
    file = tmp_path / "ds.json"
    zero = {"stage": stage, "stage3_max_live_parameters": "auto"}
    file.write_text(json.dumps({**DS_CONFIG, "zero_optimization": zero}))

    answer = estimate(file, *SIZE, "--pp", 2)

    assert_error(answer, f"{file}: ", f"does not support ZeRO-{stage} with pipeline parallelism")


SUMS_IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
WITHOUT_NORM = {
    "zero_optimization": {"stage": 2, "compute_grad_norm": False},
    "gradient_clipping": 0,
}


@pytest.mark.parametrize(
    ("config", "omitted"),
    [
        (SUMS_IN_FP32, [0]),
        (WITHOUT_NORM, [0, 3]),
        ({**SUMS_IN_FP32, **WITHOUT_NORM}, [0, 1, 3]),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, [0]),
        ({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 3}}, [3]),
    ],
)
def test_a_stage_that_deepspeed_rejects_is_left_out_with_a_remark(
    estimate, tmp_path, config, omitted
):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**DS_CONFIG, **config}))

    code, out, err = estimate(file, *SIZE)

    assert code == 0
    assert rows(out, "2 <- ")
    assert [stage for stage in range(4) if not rows(out, f"{stage} ")] == omitted
    for stage in omitted:
        assert f"stage {stage} is left out: {file}: " in err
        assert_error(estimate(file, *SIZE, "--stage", stage), str(file))


def test_a_configured_stage_that_deepspeed_rejects_is_an_error(estimate, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**DS_CONFIG, **SUMS_IN_FP32, "zero_optimization": {"stage": 0}}))

    assert_error(estimate(file, *SIZE), f"{file}: data_types.grad_accum_dtype is fp32")


def test_the_error_on_a_configured_stage_is_the_only_line(estimate, tmp_path):
    """Stages 0 and 1 are rejected too."""
    file = tmp_path / "ds.json"
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}
    file.write_text(json.dumps({**DS_CONFIG, "zero_optimization": zero}))

    assert_error(estimate(file, *SIZE), "offload_optimizer.ratio is 0.3", "at stage 2")


def test_an_hpz_partition_of_zero_ranks_is_none_as_in_deepspeed(estimate, tmp_path):
    file = tmp_path / "ds.json"
    outputs = []
    for size in (0, 1):
        zero = {"stage": 3, "zero_hpz_partition_size": size}
        file.write_text(json.dumps({**DS_CONFIG, "zero_optimization": zero}))
        outputs.append(estimate(file, *SIZE))

    assert outputs[0] == outputs[1]
    assert outputs[0][0] == 0


def test_planning_from_a_size_loads_neither_torch_nor_deepspeed(ds_json):
    program = (
        "import sys; from zerowatch.__main__ import commands;"
        f"commands(['estimate', {str(ds_json)!r}, '--world', '8', '--params', '7B'],"
        " standalone_mode=False);"
        "assert not {'torch', 'deepspeed'} & set(sys.modules)"
    )

    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=600)

    assert finished.returncode == 0, finished.stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--world", 8), "give either --params"),
        (("--world", 8, "--params", "7B", "--model", "m:n"), "give either --params"),
        (("--world", 0, "--params", "7B"), "--world is 0; give 1 to 1,000,000"),
        (("--world", 99_999_999, "--params", "7B"), "--world is 99999999; give 1 to 1,000,000"),
        (("--world", 8, "--params", "7B", "--tp", 3), "--tp 3 x --pp 1"),
        (("--world", 8, "--params", "lots"), "--params lots is not a size"),
        (("--world", 8, "--params", "-7B"), "--params -7B is too small"),
        (("--world", 8, "--params", "1e300"), "--params 1e300 is too large"),
        (("--world", 8, "--params", "nan"), "--params nan is not a size"),
        (("--world", 8, "--model", "no_colon"), "names no callable"),
        (("--world", 8, "--model", "no.such.module:build"), "cannot be imported"),
        (
            ("--world", 8, "--model", "scripts.estimator.traffic_cases:nothing"),
            "cannot be imported",
        ),
        (("--world", 8, "--model", "scripts.estimator.traffic_cases:Block"), "without arguments"),
        (
            ("--world", 8, "--model", "scripts.estimator.traffic_cases:Case.ds_config"),
            "cannot be imported",
        ),
        (("--world", 8, "--model", "builtins:dict"), "returns a dict"),
        (
            ("--world", 8, "--model", "scripts.estimator.traffic_cases:lazy"),
            "returns a model whose 1.weight has no shape yet",
        ),
        (("--world", 8, "--params", "7B", "--pp", 2, "--stage", 3), "pipeline parallelism"),
    ],
)
def test_invalid_options_print_one_line_and_exit_with_code_2(estimate, ds_json, arguments, words):
    assert_error(estimate(ds_json, *arguments), words)


_SCRIPT = """
import argparse, torch
def build():
    return torch.nn.Linear(64, 64)
def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", required=True)
    parser.parse_args()
"""


@pytest.mark.parametrize(
    ("added", "name", "words"),
    [
        (
            "parse()",
            "build",
            "ends the process when it is imported; put argument parsing under `if",
        ),
        ("", "parse", "ends the process when it is called"),
    ],
)
def test_a_model_whose_script_parses_arguments_is_reported_as_such(
    estimate, ds_json, monkeypatch, tmp_path, added, name, words
):
    (tmp_path / "parsing_script.py").write_text(_SCRIPT + added)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "parsing_script", raising=False)

    code, out, err = estimate(ds_json, "--world", 8, "--model", f"parsing_script:{name}")

    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("zerowatch: --model parsing_script:")
    assert words in err
    assert sys.argv[1] == "estimate", "the arguments are those of zerowatch again"


def test_a_script_that_parses_no_required_arguments_is_imported_without_those_of_zerowatch(
    estimate, ds_json, monkeypatch, tmp_path
):
    optional = _SCRIPT.replace("required=True", "default=1") + "parse()"
    (tmp_path / "optional_script.py").write_text(optional)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "optional_script", raising=False)

    code, out, _ = estimate(ds_json, "--world", 8, "--model", "optional_script:build")

    assert code == 0
    assert "all_reduce" in out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "has no JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' * 100_000, "nested too deeply"),
        ('{"fp16": {"enabled": true, "enabled": false}}', "the same key twice: 'enabled'"),
        ('{"train_micro_batch_size_per_gpu": 1e400}', "a number is too large"),
        (
            '{"train_micro_batch_size_per_gpu": 2,\n"gradient_accumulation_steps": Infinity\n}',
            "gradient_accumulation_steps is 'Infinity'; give a whole number of 1 or more",
        ),
        (
            '{"train_micro_batch_size_per_gpu": 2,\n"gradient_accumulation_steps": 1e300\n}',
            "gradient_accumulation_steps is 1e+300; give a whole number of 1 or more",
        ),
        (
            '{"zero_optimization": {"offload_optimizer": {"device": "cpu",\n"ratio": Infinity\n}}}',
            "zero_optimization.offload_optimizer.ratio is 'Infinity'; give a number from 0 to 1",
        ),
        ('{"zero_optimization": {"stage": 5}}', "zero_optimization.stage is 5"),
        (json.dumps({**DS_CONFIG, "train_batch_size": 63}), "train_batch_size 63"),
        (
            json.dumps(
                {
                    "train_batch_size": "auto",
                    "gradient_accumulation_steps": "auto",
                    "bf16": {"enabled": "auto"},
                    "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"},
                }
            ),
            "give a value here for gradient_accumulation_steps, bf16.enabled",
        ),
    ],
)
def test_an_invalid_configuration_prints_one_line_and_exits_with_code_2(
    estimate, tmp_path, content, words
):
    file = tmp_path / "bad.json"
    file.write_text(content)

    assert_error(estimate(file, *SIZE), f"{file}", words)


def test_a_wrong_setting_is_an_error_as_in_a_run(estimate, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**DS_CONFIG, "zerowatch": {"serve": {"prot": 9500}}}))

    assert_error(estimate(file, *SIZE), "setting 'serve.prot'", "did you mean 'serve.port'")


def test_comments_and_trailing_commas_are_accepted_as_by_deepspeed(estimate, tmp_path, ds_json):
    file = tmp_path / "commented.json"
    file.write_text("# our job\n" + ds_json.read_text()[:-1] + ",  // the end\n}")

    code, out, err = estimate(file, *SIZE)

    assert (code, err) == (0, "")
    assert out.replace(str(file), str(ds_json)) == estimate(ds_json, *SIZE)[1]


AUTO_CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}


def test_options_give_the_values_of_auto_as_hugging_face_would(estimate, tmp_path):
    auto, by_hand = tmp_path / "auto.json", tmp_path / "by_hand.json"
    auto.write_text(json.dumps(AUTO_CONFIG))
    hidden = 768  # of the typical transformer of 125M
    by_hand.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 4,
                "bf16": {"enabled": True},
                "zero_optimization": {
                    "stage": 3,
                    "reduce_bucket_size": hidden**2,
                    "stage3_prefetch_bucket_size": int(0.9 * hidden**2),
                    "stage3_param_persistence_threshold": 10 * hidden,
                },
            }
        )
    )
    size = ("--world", 8, "--params", "125M", "--sequence", 128, "--json")

    code, out, err = estimate(auto, *size, "--micro-batch", 2, "--grad-accum", 4, "--dtype", "bf16")

    assert code == 0
    assert json.loads(out) == json.loads(estimate(by_hand, *size)[1])
    assert "gradient_accumulation_steps = 4, " in err
    assert "bf16.enabled = True" in err
    assert f"reduce_bucket_size = {hidden**2}" in err


def test_a_missing_option_for_auto_is_named(estimate, tmp_path):
    (tmp_path / "auto.json").write_text(json.dumps(AUTO_CONFIG))

    answer = estimate(tmp_path / "auto.json", *SIZE, "--dtype", "bf16")

    assert_error(answer, "a value here for gradient_accumulation_steps", "--grad-accum")


@pytest.mark.parametrize(
    ("option", "value"), [("--grad-accum", 64), ("--dtype", "fp16"), ("--dtype", "fp32")]
)
def test_an_option_for_auto_where_there_is_none_is_an_error(estimate, ds_json, option, value):
    assert_error(estimate(ds_json, *SIZE, option, value), f"{option} {value}", '"auto"')


@pytest.mark.parametrize("stage", [2, 3])
def test_a_million_micro_batches_are_multiplied_not_repeated(estimate, tmp_path, stage):
    """A repeated simulation would take hours."""
    file = tmp_path / "ds.json"

    def planned(accumulation: int) -> list[dict[str, object]]:
        file.write_text(json.dumps({**DS_CONFIG, "gradient_accumulation_steps": accumulation}))
        out = estimate(file, *SIZE, "--stage", stage, "--json")[1]
        return json.loads(out)["estimates"][0]["collectives"]

    one, million = planned(1), planned(1_000_000)

    gradients = [[c for c in plan if c["purpose"] == "gradients"] for plan in (one, million)]
    assert gradients[1][0]["calls"] == 1_000_000 * gradients[0][0]["calls"]
    assert gradients[1][0]["payload_bytes"] == 1_000_000 * gradients[0][0]["payload_bytes"]


def test_less_than_the_reference_is_explained(estimate, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}')

    _, out, _ = estimate(file, "--world", 8, "--params", "125M", "--stage", 3)

    (header,) = [line.split() for line in out.splitlines() if "payload" in line and "calls" in line]
    (total,) = [line.split() for line in out.splitlines() if "total (" in line]
    assert header[-3:] == ["sent", "reference", "ratio"]
    assert float(total[-1]) < 1
    assert "Less than the reference is sent" in out


def test_a_missing_file_prints_one_line_and_exits_with_code_2(estimate, tmp_path):
    assert_error(estimate(tmp_path / "none.json", *SIZE), "cannot be read")


def test_misspelled_keys_are_named_in_one_line_before_the_estimate(estimate, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**DS_CONFIG, "gradient_cliping": 1.0, "zero_optimisation": {}}))

    code, out, err = estimate(file, *SIZE)

    assert (code, err.count("\n")) == (0, 1)
    assert "'gradient_cliping' (did you mean 'gradient_clipping'?)" in err
    assert "'zero_optimisation' (did you mean 'zero_optimization'?)" in err
    assert "Stage 2 (configured)" in out


@pytest.mark.parametrize("key", ["my_project", "wandb", "data_parallel_size", "zerowatch"])
def test_other_unknown_keys_are_not_reported(estimate, tmp_path, key):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**DS_CONFIG, key: {}}))

    _, _, err = estimate(file, *SIZE)

    assert err == ""


def assert_error(result: tuple[int, str, str], *words: str) -> None:
    code, out, err = result
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert [word for word in words if word not in err] == []


def test_a_terminal_gets_a_table_with_styles(ds_json, monkeypatch):
    from zerowatch.runtime.cli.estimate.result_tables import Heading, print_estimates
    from zerowatch.runtime.estimator.estimate_step import estimate_step
    from zerowatch.runtime.estimator.model_shape import Topology
    from zerowatch.runtime.estimator.typical_model import typical_transformer

    written: list[str] = []
    terminal = Terminal(written)
    model, ranks = typical_transformer(10**9), Topology(world_size=8)

    print_estimates(
        [estimate_step(model, DS_CONFIG, ranks)], Heading("ds.json", model, ranks, 2), terminal
    )

    assert "\x1b[1m" in "".join(written)


class Terminal:
    encoding = "utf-8"

    def __init__(self, written: list[str]) -> None:
        self._written = written

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._written.append(text)
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        self._written += lines

    def flush(self) -> None:
        """Nothing is buffered."""


def test_errors_are_one_line_with_click_before_8_2_as_well(ds_json):
    script = (
        "import click, sys\n"
        "if hasattr(click.exceptions, 'NoArgsIsHelpError'):\n"
        "    del click.exceptions.NoArgsIsHelpError\n"
        "from zerowatch.__main__ import main\n"
        f"sys.argv = ['zerowatch', 'estimate', {str(ds_json)!r}]\n"
        "main()\n"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert done.returncode == 2
    assert done.stderr.startswith("zerowatch: Missing option '--world'")
    assert len(done.stderr.splitlines()) == 1
