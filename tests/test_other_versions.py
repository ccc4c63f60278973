"""Monitoring works with older releases of DeepSpeed, and with Python 3.12 and the lowest torch.

An older DeepSpeed is installed into a folder, which precedes the installed one. Python 3.12 gets an
environment of its own, with all packages from the index, which takes some minutes and gigabytes.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from package_tree import ROOT
from scripts.launching import SCRIPTS, environment

from zerowatch.runtime.common.deepspeed_internals import FIRST_FOR_TRAINING_RUN

pytestmark = pytest.mark.slow  # installs packages, and trains with each of them

JOB = SCRIPTS / "versions_job.py"
TOO_OLD_FOR_TRAINING_RUN = ("0.17.6", "0.18.9")
OLDER = (*TOO_OLD_FOR_TRAINING_RUN, FIRST_FOR_TRAINING_RUN)
LOWEST_TORCH = "2.6.0"
PHASES = ["backward", "forward", "optimizer", "other"]
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", ".build", ".*_cache", "build", "runs", "*.egg-info", "__pycache__"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Function that returns a folder with one release of DeepSpeed."""

    @functools.cache
    def folder_of(release: str) -> Path:
        folder = tmp_path_factory.mktemp("deepspeed")
        options = ("--no-deps", "--no-build-isolation", "--target", folder)
        pip(sys.executable, *options, f"deepspeed=={release}")
        return folder

    return folder_of


def pip(python: str | Path, *arguments: object) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", *map(str, arguments)]
    done = subprocess.run(
        command, env=environment(DS_BUILD_OPS="0"), capture_output=True, text=True
    )
    if done.returncode:  # no network, or no build for this Python
        pytest.skip(f"pip cannot install it: {done.stderr.splitlines()[-1]}")


def start(
    folder: Path, *arguments: object, packages: Path | str = "", python: str | Path = sys.executable
) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    return subprocess.run(
        [str(python), str(JOB), *map(str, arguments)],
        cwd=folder,
        env=environment(PYTHONPATH=str(packages), LOCAL_RANK="0", RANK="0", WORLD_SIZE="1"),
        capture_output=True,
        text=True,
        timeout=600,
    )


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    (report,) = (line for line in done.stdout.splitlines() if line.startswith('{"losses"'))
    return dict(json.loads(report))


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("release", OLDER)
def test_an_older_deepspeed_is_monitored_and_trains_the_same(
    installed: Any, tmp_path: Path, release: str, stage: int
) -> None:
    packages = installed(release)
    plain = result(start(tmp_path / "plain", stage, "plain", packages=packages))

    watched = result(start(tmp_path / "watched", stage, "watch", packages=packages))

    assert watched["losses"] == plain["losses"]
    assert (watched["steps"], watched["phases"]) == ([1, 2, 3], PHASES)
    assert watched["collectives"] or stage == 0
    assert watched["hook_failures"] == 0


@pytest.mark.parametrize("release", TOO_OLD_FOR_TRAINING_RUN)
def test_a_training_run_refuses_a_deepspeed_that_ends_windows_itself(
    installed: Any, tmp_path: Path, release: str
) -> None:
    done = start(tmp_path / "run", 2, "run", packages=installed(release))

    assert done.returncode == 1
    last = done.stderr.rstrip().splitlines()[-1]
    assert f"needs DeepSpeed {FIRST_FOR_TRAINING_RUN} or newer, got {release}" in last
    assert not (tmp_path / "run/runs").exists()


def test_a_training_run_works_with_the_first_release_that_it_accepts(
    installed: Any, tmp_path: Path
) -> None:
    packages = installed(FIRST_FOR_TRAINING_RUN)
    plain = result(start(tmp_path / "plain", 2, "plain", packages=packages))

    run = result(start(tmp_path / "run", 2, "run", packages=packages))

    assert run["losses"] == pytest.approx(plain["losses"])
    assert (run["steps"], run["hook_failures"]) == ([1, 2, 3], 0)


@pytest.fixture(scope="module")
def python_312(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python 3.12 of an environment into which pip has installed zerowatch and the lowest torch."""
    program = shutil.which("python3.12")
    if program is None or subprocess.run([program, "-c", ""], capture_output=True).returncode:
        pytest.skip("needs python3.12")
    folder = tmp_path_factory.mktemp("python")
    source = shutil.copytree(ROOT, folder / "source", ignore=NOT_SOURCE)
    subprocess.run([program, "-m", "venv", str(folder / "environment")], check=True)
    python = folder / "environment/bin/python"
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    others = [line for line in pinned if not line.startswith(("torch==", "sympy=="))]
    (folder / "others.txt").write_text("\n".join(others))
    pip(python, "-c", folder / "others.txt", source, f"torch=={LOWEST_TORCH}")
    return python


def test_the_lowest_torch_and_deepspeed_here_are_those_of_pyproject() -> None:
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]

    assert f"deepspeed>={OLDER[0]}" in requirements
    assert f"torch>={LOWEST_TORCH.removesuffix('.0')}" in requirements


def test_python_312_and_the_lowest_torch_train_and_monitor(
    python_312: Path, tmp_path: Path
) -> None:
    watched = result(start(tmp_path / "watched", 2, "watch", python=python_312))
    run = result(start(tmp_path / "run", 2, "run", python=python_312))

    assert watched["losses"] == pytest.approx(run["losses"])
    for each in (watched, run):
        assert (each["steps"], each["phases"], each["hook_failures"]) == ([1, 2, 3], PHASES, 0)
