"""A killed rank leaves a step log and a ring, which together lack the last step at most."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from fakes.scraper import eventually
from scripts.forked_ranks import running_ranks
from scripts.launching import SCRIPTS, TIMEOUT_SECONDS

from zerowatch.runtime.monitor.step_ring import recover

pytestmark = pytest.mark.jobs


def logged_steps(log: Path) -> list[int]:
    return [json.loads(line)["step"] for line in log.read_text().splitlines() if line]


def test_sigkill_loses_at_most_the_step_in_flight(tmp_path: Path) -> None:
    script = SCRIPTS / "monitor" / "train_until_killed.py"
    logs = [tmp_path / "runs" / "killed" / f"rank-{rank}.jsonl" for rank in (0, 1)]
    variables = {"ZEROWATCH_RUN_ID": "killed"}
    with running_ranks(2, "-m", "zerowatch", script, cwd=tmp_path, variables=variables) as ranks:
        trains = eventually(
            lambda: (
                (logs[1].exists() and len(logged_steps(logs[1])) >= 20)
                or ranks.codes() != [None, None]
            ),
            TIMEOUT_SECONDS,
        )
        assert trains, "the job has logged no 20 steps"
        assert ranks.codes() == [None, None], ranks.output()

        os.kill(ranks.pids[1], signal.SIGKILL)
        ranks.join()

    recover(tmp_path / "runs", Path("/dev/shm"))
    survivor, killed = (logged_steps(log) for log in logs)
    assert killed == list(range(1, len(killed) + 1))
    assert set(survivor) - set(killed) <= {max(survivor)}
