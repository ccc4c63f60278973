"""Unmodified training scripts are monitored on two ranks, with unchanged output."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from scripts.forked_ranks import start_ranks
from scripts.launching import (
    DEEPSPEED,
    SCRIPTS,
    ZEROWATCH,
    Finished,
    own_lines,
    start,
    steps_logged,
)
from servers.free_port import free_port

pytestmark = pytest.mark.jobs

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2},
    "zero_force_ds_cpu_optimizer": False,
}
TRAINER = (
    *("--deepspeed", "ds.json", "--output_dir", "out", "--report_to", "none"),
    *("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"),
    *("--max_steps", "3", "--logging_steps", "1", "--save_strategy", "no"),
    *("--disable_tqdm", "true"),
)


def started_as_by_a_launcher(num: int, *job: object, cwd: Path) -> Finished:
    """Run `python -m zerowatch JOB` on each rank, as launchers do."""
    return start_ranks(num, "-m", "zerowatch", *job, cwd=cwd)


def launched(num: int, *job: object, cwd: Path) -> Finished:
    """Run `zerowatch run JOB`; the launcher is forked, and its ranks are started."""
    command = (ZEROWATCH, "run", "--standalone", "--nproc-per-node", num, *job)
    return start_ranks(1, *command, cwd=cwd)


def assert_that_output_is_unchanged_and_steps_are_logged(
    run: Callable[..., Finished], num: int, *job: object, steps: int, cwd: Path
) -> None:
    unmonitored = start_ranks(num, *job, cwd=cwd)
    assert unmonitored.returncode == 0, unmonitored.stderr
    assert not (cwd / "runs").exists()

    finished = run(num, *job, cwd=cwd)

    assert finished.returncode == 0, finished.stderr
    assert own_lines(finished) == own_lines(unmonitored) != []
    each = list(range(1, steps + 1))
    assert steps_logged(cwd) == {f"rank-{rank}.jsonl": each for rank in range(num)}
    assert_that_the_run_is_announced_once(finished, has_tables=run is launched)


def assert_that_the_run_is_announced_once(finished: Finished, *, has_tables: bool) -> None:
    """Whatever the number of ranks: where the run is, its report, and under a launcher tables."""
    ours = [line for line in finished.stderr.splitlines() if line.startswith("zerowatch: ")]
    # A start that takes more than a minute, as on a busy machine, is reported too.
    lines = [line for line in ours if "still before the first step" not in line]
    assert [line.split()[1] for line in lines] == ["watching", "report"]
    assert finished.stderr.count("Where the time went") == has_tables
    assert "\r" not in finished.stderr


@pytest.mark.parametrize(
    ("script", "arguments", "steps", "run"),
    [
        ("train_tiny.py", (), 5, started_as_by_a_launcher),
        pytest.param("train_tiny.py", (), 5, launched, marks=pytest.mark.slow),
        pytest.param("train_trainer.py", TRAINER, 3, launched, marks=pytest.mark.slow),
        pytest.param("train_accelerate.py", (), 8, launched, marks=pytest.mark.slow),
    ],
)
def test_a_monitored_script_prints_what_it_prints_unmonitored(
    tmp_path, script, arguments, steps, run
):
    (tmp_path / "ds.json").write_text(json.dumps(DS_CONFIG))
    job = (SCRIPTS / "cli" / script, *arguments)

    assert_that_output_is_unchanged_and_steps_are_logged(run, 2, *job, steps=steps, cwd=tmp_path)


@pytest.mark.slow
def test_a_script_that_imports_names_from_deepspeed_is_monitored(tmp_path):
    script = SCRIPTS / "cli" / "train_from_import.py"

    # Its rank is not forked: what was imported before would be wrapped in place.
    assert_that_output_is_unchanged_and_steps_are_logged(launched, 1, script, steps=4, cwd=tmp_path)


@pytest.mark.slow
def test_the_deepspeed_launcher_starts_a_monitored_script_by_module(tmp_path):
    job = ("--num_gpus", "2", "--master_port", free_port(), "--module", "zerowatch")

    finished = start(DEEPSPEED, *job, SCRIPTS / "cli" / "train_tiny.py", cwd=tmp_path)

    assert finished.returncode == 0, finished.stderr
    steps = [1, 2, 3, 4, 5]
    assert steps_logged(tmp_path) == {"rank-0.jsonl": steps, "rank-1.jsonl": steps}


def monitored_ranks(num, *arguments, cwd, variables=None):
    """Run `python -m zerowatch ARGUMENTS` on each rank, as a launcher does."""
    return start_ranks(num, "-m", "zerowatch", *arguments, cwd=cwd, variables=variables)


def test_disabled_monitoring_leaves_no_trace(tmp_path):
    off = {"ZEROWATCH_ENABLED": "false"}

    finished = monitored_ranks(1, SCRIPTS / "cli" / "train_tiny.py", cwd=tmp_path, variables=off)

    assert finished.returncode == 0, finished.stderr
    assert len(own_lines(finished)) == 5
    assert os.listdir(tmp_path) == []


def test_a_missing_ds_config_is_explained_before_deepspeeds_own_error(tmp_path):
    job = (SCRIPTS / "cli" / "train_tiny.py", "--deepspeed_config=ds.json")

    finished = monitored_ranks(2, *job, cwd=tmp_path)

    assert finished.returncode == 1
    ours = f"zerowatch: ds.json: no such file in {tmp_path}; check the path given to DeepSpeed"
    theirs = "ValueError: Expected a string path to an existing deepspeed config"
    # Not once per rank; and if rank 1 fails first, the launcher may end rank 0 before its line.
    assert finished.stderr.splitlines().count(ours) <= 1
    assert theirs in finished.stderr
    assert "attach.py" not in finished.stderr


def test_an_unknown_key_is_explained_without_a_frame_of_ours(tmp_path):
    ds_config = {"train_batch_size": 4, "zero_optimization": {"stge": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(ds_config))
    given = ("--deepspeed_config", "ds.json")

    finished = monitored_ranks(1, SCRIPTS / "cli" / "train_tiny.py", *given, cwd=tmp_path)

    assert finished.returncode == 1
    line = "zerowatch: ds.json: unknown key 'zero_optimization.stge'; did you mean 'stage'?"
    assert line in finished.stderr.splitlines()
    assert "1 validation error for DeepSpeedZeroConfig" in finished.stderr
    assert os.path.join("runtime", "entry_points.py") not in finished.stderr


def test_a_script_that_catches_the_error_of_its_ds_config_catches_deepspeeds(tmp_path):
    (tmp_path / "careful.py").write_text(
        "import deepspeed, torch\n"
        "deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False\n"
        "try:\n"
        "    deepspeed.initialize(model=torch.nn.Linear(1, 1), config='ds.json')\n"
        "except ValueError as error:\n"
        "    print('out:', type(error).__name__, str(error)[:30])\n"
    )

    finished = monitored_ranks(1, "careful.py", cwd=tmp_path)

    assert finished.returncode == 0, finished.stderr
    assert own_lines(finished) == ["out: ValueError Expected a string path to an e"]
    assert "zerowatch:" not in finished.stderr


def test_a_ds_config_that_the_trainer_cannot_read_is_explained(tmp_path):
    job = (SCRIPTS / "cli" / "train_trainer.py", *TRAINER)

    finished = monitored_ranks(1, *job, cwd=tmp_path)

    assert finished.returncode == 1
    line = f"zerowatch: ds.json: no such file in {tmp_path}; check the path given to DeepSpeed"
    assert line in finished.stderr.splitlines()


@pytest.mark.parametrize(("arguments", "num_targets"), [((), 0), (("raise",), 1), (("exit",), 1)])
def test_a_run_has_targets_after_a_failure_but_not_after_a_normal_end(
    tmp_path, arguments, num_targets
):
    script = SCRIPTS / "cli" / "end_or_fail.py"

    finished = monitored_ranks(1, script, *arguments, cwd=tmp_path)

    assert finished.returncode == bool(arguments), finished.stderr
    (file,) = tmp_path.glob("runs/*/targets.json")
    assert len(json.loads(file.read_text())) == num_targets
