"""Ctrl-C ends a job: no rank reports that another one has failed."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from fakes.scraper import eventually
from scripts.launching import SCRIPTS, TIMEOUT_SECONDS, TWO_RANKS, ZEROWATCH, environment

pytestmark = pytest.mark.jobs


def test_ctrl_c_is_not_reported_as_the_failure_of_a_rank(tmp_path: Path) -> None:
    command = [ZEROWATCH, "run", *TWO_RANKS, str(SCRIPTS / "monitor" / "train_until_killed.py")]
    logs = [tmp_path / "runs" / "stopped" / f"rank-{rank}.jsonl" for rank in (0, 1)]
    variables = environment(ZEROWATCH_RUN_ID="stopped", RANKS_FOLDER=str(tmp_path))
    with (tmp_path / "output").open("w+") as output:
        job = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=output, stderr=output)
        try:
            trains = eventually(
                lambda: all(log.exists() for log in logs), TIMEOUT_SECONDS, pause=0.1
            )
            assert trains, (tmp_path / "output").read_text()
            for rank in (0, 1):  # a terminal sends the signal to all of them
                os.kill(int((tmp_path / f"rank-{rank}.pid").read_text()), signal.SIGINT)
            job.send_signal(signal.SIGINT)
            job.wait(timeout=TIMEOUT_SECONDS)
        finally:
            job.kill()
            job.wait()
    printed = (tmp_path / "output").read_text()

    assert "KeyboardInterrupt" in printed
    assert "diverged" not in printed
    assert " died" not in printed
