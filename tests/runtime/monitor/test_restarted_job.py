"""A rank is killed and the job restarted: the report is about the attempt that died."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts.launching import SCRIPTS, TWO_RANKS, ZEROWATCH, start

pytestmark = pytest.mark.jobs


def test_the_report_has_the_killed_attempt_only_and_the_rank_that_exited_first(
    tmp_path: Path,
) -> None:
    script = SCRIPTS / "monitor" / "kill_a_rank_once.py"

    finished = start(
        *(ZEROWATCH, "run", *TWO_RANKS, "--max-restarts", "1", script),
        cwd=tmp_path,
        variables={"ZEROWATCH_RUN_ID": "night"},
    )

    assert finished.returncode == 0, finished.stderr
    run = tmp_path / "runs" / "night"
    lines = (run / "rank-1.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines if line]
    last_step = max(record["step"] for record in records if record["attempt"] == 0)
    (report,) = run.glob("*/rank-1-killed.txt")
    text = report.read_text().splitlines()
    assert text[0].startswith("rank 1 was the first rank of this host to exit, by SIGKILL, ")
    assert f"after step {last_step}" in text[0]
    table = next(number for number, line in enumerate(text) if line.startswith("Last records"))
    steps = [
        int(line.split()[0])
        for line in text[table + 2 :]
        if line.split()[:1] != [] and line.split()[0].isdigit()
    ]
    assert steps == sorted(steps)
    assert report.parent.name == "exits"
    assert not (run / "oom").exists()
    for other in run.glob("*/rank-0-killed.txt"):  # it may have ended by an error of its own
        assert "after rank 1 had exited by SIGKILL" in other.read_text().splitlines()[0]
