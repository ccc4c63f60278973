"""A killed rank leaves a step log that lacks the last step at most."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripts.launching import SCRIPTS, TIMEOUT_SECONDS, environment

pytestmark = pytest.mark.jobs


def logged_steps(log: Path) -> list[int]:
    return [json.loads(line)["step"] for line in log.read_text().splitlines() if line]


def test_sigkill_loses_at_most_the_step_in_flight(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [
        "--nproc-per-node=2",
        "-m",
        "zerowatch",
        str(SCRIPTS / "monitor" / "train_until_killed.py"),
    ]
    logs = [tmp_path / "runs" / "killed" / f"rank-{rank}.jsonl" for rank in (0, 1)]
    with (tmp_path / "output").open("w+") as output:
        variables = environment(ZEROWATCH_RUN_ID="killed", RANKS_FOLDER=str(tmp_path))
        job = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + TIMEOUT_SECONDS
            while not (logs[1].exists() and len(logged_steps(logs[1])) >= 20):
                assert time.monotonic() < deadline, "the job has logged no 20 steps"
                assert job.poll() is None, output.read()
                time.sleep(0.05)

            os.kill(process_id(tmp_path, 1), signal.SIGKILL)
            job.wait(timeout=TIMEOUT_SECONDS)
        finally:
            job.kill()
            job.wait()
            for rank in (0, 1):  # the launcher puts each rank into a session of its own
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id(tmp_path, rank), signal.SIGKILL)

    survivor, killed = (logged_steps(log) for log in logs)
    assert killed == list(range(1, len(killed) + 1))
    assert set(survivor) - set(killed) <= {max(survivor)}


def process_id(folder: Path, rank: int) -> int:
    return int((folder / f"rank-{rank}.pid").read_text())
