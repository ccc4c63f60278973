"""A rank is killed and the job restarted: the report is about the attempt that died."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts.forked_ranks import fork_ranks
from scripts.launching import SCRIPTS, TWO_RANKS, ZEROWATCH, start

pytestmark = pytest.mark.jobs


SCRIPT = SCRIPTS / "monitor" / "kill_a_rank_once.py"


def test_the_report_has_the_killed_attempt_only(tmp_path: Path) -> None:
    for attempt in ("0", "1"):  # as torchrun starts it
        variables = {
            "ZEROWATCH_RUN_ID": "night",
            "TORCHELASTIC_RESTART_COUNT": attempt,
            "TORCHELASTIC_MAX_RESTARTS": "1",
            "TORCHELASTIC_RUN_ID": "job",
            "TORCHELASTIC_ERROR_FILE": str(tmp_path / "errors" / f"attempt_{attempt}" / "0" / "e"),
        }
        ranks = fork_ranks(2, "-m", "zerowatch", SCRIPT, cwd=tmp_path, variables=variables)

    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    assert_that_it_has_the_killed_attempt_only(tmp_path / "runs" / "night")


@pytest.mark.slow
def test_the_report_of_a_job_with_a_launcher_has_the_rank_that_exited_first(
    tmp_path: Path,
) -> None:
    finished = start(
        *(ZEROWATCH, "run", *TWO_RANKS, "--max-restarts", "1", SCRIPT),
        cwd=tmp_path,
        variables={"ZEROWATCH_RUN_ID": "night"},
    )

    assert finished.returncode == 0, finished.stderr
    run = tmp_path / "runs" / "night"
    verdict = assert_that_it_has_the_killed_attempt_only(run)
    assert verdict.startswith("rank 1 was the first rank of this host to fail, by SIGKILL, ")
    assert not (run / "oom").exists()
    assert len(list((run / "launchers").iterdir())) == 1  # by which the restart found the folder
    for other in run.glob("*/rank-0-killed.txt"):  # it may have ended by an error of its own
        assert "after rank 1 had exited by SIGKILL" in other.read_text().splitlines()[0]


def assert_that_it_has_the_killed_attempt_only(run: Path) -> str:
    """Check the report of rank 1, and return its first line."""
    lines = (run / "rank-1.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines if line]
    last_step = max(record["step"] for record in records if record["attempt"] == 0)
    (report,) = run.glob("*/rank-1-killed.txt")
    text = report.read_text().splitlines()
    assert f"after step {last_step}" in text[0]
    table = next(number for number, line in enumerate(text) if line.startswith("Last records"))
    steps = [
        int(line.split()[0])
        for line in text[table + 2 :]
        if line.split()[:1] != [] and line.split()[0].isdigit()
    ]
    assert steps == sorted(steps)
    assert report.parent.name == "exits"
    return text[0]
