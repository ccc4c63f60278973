"""`zerowatch run`: torchrun's options and ranks, with the script's own exit code."""

from __future__ import annotations

import re
import sys

import pytest
from scripts.launching import SCRIPTS, TWO_RANKS, ZEROWATCH, own_lines, start

RUN = (ZEROWATCH, "run")
COUNT = SCRIPTS / "cli" / "count_to_two.py"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("nofile.py",), "no script 'nofile.py' in {cwd}"),
        (("-m", "no_such.module"), "no module named 'no_such', here or installed"),
        (("--standalone",), "the following arguments are required: training_script, "),
        (("--no-such-option", "train.py"), "unrecognized arguments: --no-such-option"),
        (("--no-python", "train.py"), "--no-python cannot be monitored, "),
        (("--standalone", "--run-path", "train.py"), "--run-path cannot be monitored, "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_invalid_command_is_one_line_and_exit_code_2(tmp_path, arguments, line):
    finished = start(*RUN, *arguments, cwd=tmp_path)

    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr.startswith(f"zerowatch: run: {line.format(cwd=tmp_path)}")
    assert finished.stderr.count("\n") == 1


def test_help_shows_both_forms_without_importing_torch(tmp_path):
    shows = (
        "import sys; from zerowatch.__main__ import commands; "
        "commands(['--help'], standalone_mode=False); print('torch' in sys.modules)"
    )

    finished = start(sys.executable, "-c", shows, cwd=tmp_path)

    assert re.search(r"run +Run a script under torchrun", finished.stdout)
    assert "python -m zerowatch SCRIPT [ARGS]..." in finished.stdout
    assert finished.stdout.endswith("False\n")


@pytest.mark.jobs
def test_every_rank_gets_the_scripts_arguments_and_the_same_run_id(tmp_path):
    finished = start(*RUN, *TWO_RANKS, COUNT, "--help", "-m", "--nproc-per-node", "9", cwd=tmp_path)

    assert finished.returncode == 0
    lines = sorted(own_lines(finished))
    arguments = "args ['--help', '-m', '--nproc-per-node', '9']"
    assert lines[:2] == [f"out: rank {rank} of 2 {arguments}" for rank in (0, 1)]
    assert lines[2] == lines[3]
    assert re.fullmatch(r"out: run \d{8}T\d{6}-[0-9a-f]{6}", lines[2])


@pytest.mark.jobs
def test_the_users_run_id_is_kept(tmp_path):
    variables = {"ZEROWATCH_RUN_ID": "night"}

    finished = start(*RUN, "--standalone", COUNT, cwd=tmp_path, variables=variables)

    assert "out: run night" in own_lines(finished)


@pytest.mark.jobs
def test_the_command_sets_no_run_id_on_several_nodes(tmp_path):
    several = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")

    finished = start(*RUN, *several, "--rdzv-conf", "last_call_timeout=1", COUNT, cwd=tmp_path)

    assert "out: run None" in own_lines(finished)


@pytest.mark.jobs
def test_a_module_runs_instead_of_a_script(tmp_path):
    finished = start(
        *RUN, "--standalone", "-m", "scripts.cli.count_to_two", "-m", cwd=SCRIPTS.parent
    )

    assert own_lines(finished)[0] == "out: rank 0 of 1 args ['-m']"


@pytest.mark.jobs
@pytest.mark.parametrize(("way", "code"), [("fail", 7), ("die", 128 + 9)])
def test_the_exit_code_is_that_of_the_rank_that_failed_first(tmp_path, way, code):
    finished = start(*RUN, *TWO_RANKS, COUNT, way, cwd=tmp_path)

    assert finished.returncode == code
    assert f"{COUNT} FAILED" in finished.stderr  # torchrun's summary, in the script's name
    assert "Traceback" not in finished.stderr
