"""Starts scripts as a user does: with plain python, with monitoring, and on two ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

SCRIPTS = Path(__file__).parent
ZEROWATCH = str(Path(sys.executable).with_name("zerowatch"))
DEEPSPEED = str(Path(sys.executable).with_name("deepspeed"))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
ABORTED = "terminate called without an active exception"
TWO_RANKS = ("--standalone", "--nproc-per-node", "2")

Finished = subprocess.CompletedProcess[str]


def plain(*arguments: object, cwd: Path | None = None) -> Finished:
    """Run `python ARGUMENTS`."""
    return start(sys.executable, *arguments, cwd=cwd)


def monitored(*arguments: object, cwd: Path | None = None, **variables: str) -> Finished:
    """Run `python -m zerowatch ARGUMENTS`."""
    return start(sys.executable, "-m", "zerowatch", *arguments, cwd=cwd, variables=variables)


# Far above what a job takes, also where others take the machine: it only ends a job that hangs.
TIMEOUT_SECONDS = 600.0


def start(
    *command: object, cwd: Path | None = None, variables: Mapping[str, str] | None = None
) -> Finished:
    """Run a command to its end, and repeat it once if torch aborts at exit.

    torch 2.13's gloo aborts about one interpreter in a hundred at exit, monitored or not.
    """
    before = set(cwd.iterdir()) if cwd else set()
    done = _run(command, cwd, variables)
    if done.returncode == 0 or ABORTED not in done.stderr:
        return done
    if cwd:
        clean(cwd, before)
    return _run(command, cwd, variables)


def clean(folder: Path, before: Container[Path]) -> None:
    """Remove the entries of a folder that are not in `before`."""
    for path in folder.iterdir():
        if path not in before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _run(
    command: Sequence[object], cwd: Path | None, variables: Mapping[str, str] | None
) -> Finished:
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment(**(variables or {})),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a CPU job that uses the loopback interface only."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("ZEROWATCH_")}
    return own | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "ZEROWATCH_SERVE_PORT": "0",
        **variables,
    }


def steps_logged(folder: Path) -> dict[str, list[int]]:
    """Return, by file name, the steps in the run logs of the one run under `folder`."""
    (run,) = (folder / "runs").iterdir()
    return {
        log.name: [json.loads(line)["step"] for line in log.read_text().splitlines() if line]
        for log in sorted(run.glob("rank-*.jsonl"))
    }


def own_lines(finished: Finished) -> list[str]:
    """Return the lines that the training scripts here print themselves, apart from DeepSpeed's."""
    return [line for line in finished.stdout.splitlines() if line.startswith("out: ")]
