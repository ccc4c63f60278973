"""Jobs of the GPU checks: their results, and the messages of ranks that fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu import rank_jobs

REPORT = """
import json, os, sys, time
rank = os.environ["RANK"]
"""


def write(folder: Path, body: str) -> str:
    (folder / "job.py").write_text(REPORT + body)
    return str(folder / "job.py")


def test_each_rank_reports_what_it_found_and_all_meet_at_one_port(tmp_path: Path) -> None:
    job = write(
        tmp_path,
        """
found = [sys.argv[2], rank, os.environ["MASTER_PORT"]]
open(f"{sys.argv[1]}/rank-{rank}.json", "w").write(json.dumps(found))
""",
    )

    first, second = rank_jobs.run_job(job, tmp_path, "large", kind="cpu", world_size=2)

    assert first[:2] == ["large", "0"]
    assert second[:2] == ["large", "1"]
    assert first[2] == second[2]


def test_a_rank_that_fails_is_named_by_its_error_although_its_peer_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_jobs, "GRACE_SECONDS", 0.1)
    job = write(tmp_path, "sys.exit('no memory') if rank == '1' else time.sleep(600)")

    with pytest.raises(AssertionError, match="no memory"):
        rank_jobs.run_job(job, tmp_path, kind="cpu", world_size=2)


def test_code_returns_what_it_writes_or_raises_with_its_error() -> None:
    assert rank_jobs.run_code("out(one=1); print('noise'); out(two=[2])") == {"one": 1, "two": [2]}

    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        rank_jobs.run_code("1 / 0")
