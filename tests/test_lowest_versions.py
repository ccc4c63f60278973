"""Every command works with the lowest versions of the dependencies that pyproject.toml allows.

So does the sink of W&B, which is installed alone: it needs a later click. torch and DeepSpeed are
gigabytes and stay as installed; so does OpenTelemetry's SDK, which requires an API as new as it is.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from package_tree import ROOT
from scripts.launching import SCRIPTS, ZEROWATCH, environment

pytestmark = pytest.mark.slow  # installs packages, and trains twice

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ALLOWED = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dashboards"]]
AS_INSTALLED = ("torch", "deepspeed")
WANDB = PROJECT["optional-dependencies"]["wandb"]
WRITE_TO_WANDB = """
import wandb
from zerowatch.runtime.sinks.sink import SinkRun
from zerowatch.runtime.sinks.wandb_sink import WandbSink

sink = WandbSink()
sink.open(SinkRun(run_id="night-7", folder=None))
sink.write({"zerowatch/loss": 2.5}, step=1, unix_seconds=1.0)
sink.close(failed=False)
print("version", wandb.__version__)
"""
DS_CONFIG = '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}'


@pytest.fixture(scope="module")
def lowest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the lowest versions that pyproject.toml allows."""
    folder = tmp_path_factory.mktemp("lowest")
    pinned = [requirement.replace(">=", "==") for requirement in ALLOWED]
    pinned = [pin for pin in pinned if pin.partition("==")[0] not in AS_INSTALLED]
    alone = [pin for pin in pinned if pin.startswith("torchdata")]  # it depends on torch
    _install(folder, *(pin for pin in pinned if pin not in alone))
    _install(folder, "--no-deps", *alone)
    return folder


def _install(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, "--target", str(folder), *arguments], capture_output=True, text=True
    )
    if done.returncode:  # no network, or no build of an old version for this Python
        pytest.skip(f"pip cannot install the lowest versions: {done.stderr.splitlines()[-1]}")


def run(
    lowest: Path, folder: Path, *arguments: object, program: str = ZEROWATCH, **variables: str
) -> tuple[int, str]:
    """Run a command with the lowest versions; return its exit code and both its outputs."""
    done = subprocess.run(
        [program, *map(str, arguments)],
        cwd=folder,
        env=environment(PYTHONPATH=str(lowest), **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout


def test_the_versions_in_use_are_the_lowest(lowest: Path, tmp_path: Path) -> None:
    names = [re.split("[>=]", requirement)[0] for requirement in ALLOWED]
    script = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"

    code, out = run(lowest, tmp_path, "-c", script, *names, program=sys.executable)

    found = dict(zip(names, out.split(), strict=True))
    for requirement in ALLOWED:
        name, _, least = requirement.partition(">=")
        expected = version(name) if name in AS_INSTALLED else least
        assert (found[name] + ".").startswith(expected + ".")
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "expected", "words"),
    [
        (["--version"], 0, "zerowatch, version"),
        (["--help"], 0, "estimate"),
        (["run", "--help"], 0, "SCRIPT"),
        (["estimate", "ds.json", "--world", "8", "--params", "7B"], 0, "Memory per rank"),
        (["estimate", "ds.json", "--world", "8", "--params", "7B", "--json"], 0, "wire_bytes"),
        (["dashboards", "build", "--check"], 0, ""),
        (["stack", "down", "--native"], 0, ""),
        (["estimate", "ds.json"], 2, "zerowatch: Missing option '--world'"),
        (["train.py"], 2, "zerowatch: No such command 'train.py'"),
        (["run", "absent.py"], 2, "zerowatch: run: no script 'absent.py'"),
    ],
)
def test_a_command_works_with_the_lowest_versions(
    lowest: Path, tmp_path: Path, arguments: list[str], expected: int, words: str
) -> None:
    (tmp_path / "ds.json").write_text(DS_CONFIG)

    code, out = run(lowest, tmp_path, *arguments)

    assert (code, "Traceback" in out) == (expected, False), out
    assert words in out


@pytest.mark.parametrize("group", [[], ["stack"], ["dashboards"]])
def test_a_group_without_a_command_prints_its_help(
    lowest: Path, tmp_path: Path, group: list[str]
) -> None:
    code, out = run(lowest, tmp_path, *group)

    assert code in (0, 2)  # click 8.1 ends with 0, click 8.2 with 2
    assert "Usage: zerowatch" in out


def test_training_is_monitored_with_the_lowest_versions(lowest: Path, tmp_path: Path) -> None:
    script = SCRIPTS / "cli/train_tiny.py"

    code, out = run(lowest, tmp_path, "run", "--standalone", "--nproc-per-node", 1, script)

    assert code == 0, out
    assert "hook" not in out  # no part of the monitoring failed
    (log,) = tmp_path.glob("runs/*/rank-0.jsonl")
    assert len(log.read_text().splitlines()) == 5


def test_the_demo_tunes_with_the_lowest_versions(lowest: Path, tmp_path: Path) -> None:
    code, out = run(lowest, tmp_path, "demo", "--steps", 5, "--nproc", 1)

    assert (code, "Traceback" in out) == (0, False), out
    assert "hook" not in out


def test_a_run_of_wandb_is_begun_without_a_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    _install(tmp_path / "lowest", *(pin.replace(">=", "==") for pin in WANDB))

    code, out = run(
        tmp_path / "lowest",
        tmp_path,
        "-c",
        WRITE_TO_WANDB,
        program=sys.executable,
        HOME=str(tmp_path),  # without a login
    )

    assert code == 0, out
    assert "W&B has no API key" in out
    (least,) = (pin.partition(">=")[2] for pin in WANDB)
    assert f"version {least}" in out
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 1
