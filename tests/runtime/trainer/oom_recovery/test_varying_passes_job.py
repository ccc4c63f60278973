"""Tests of out of memory on one rank in a pass that issues other collectives than before."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from chosen_cases import tiers
from scripts.forked_ranks import fork_ranks
from scripts.launching import SCRIPTS

pytestmark = pytest.mark.jobs

FAILING_RANK = 1
LIMIT_SECONDS = 60.0  # gloo itself waits for 30 minutes


def run(world_size: int, case: str, folder: Path) -> tuple[list[int], dict[int, Any]]:
    """Return the exit codes, and what each rank wrote unless it was aborted.

    Once a rank has ended, ranks that have not ended after LIMIT_SECONDS are killed.
    """
    script = SCRIPTS / "trainer" / "varying_passes.py"
    done = fork_ranks(world_size, script, folder, case, cwd=folder, grace_seconds=LIMIT_SECONDS)
    files = {rank: folder / f"rank-{rank}.json" for rank in range(world_size)}
    found = {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}
    return [rank.returncode for rank in done], found


@pytest.mark.parametrize(
    ("world_size", "case"),
    tiers(
        [(2, "longer"), (2, "shorter"), (2, "another group"), (3, "longer"), (3, "shorter")],
        quick=[(2, "longer")],
    ),
)
def test_the_run_ends_soon_on_all_ranks_if_the_pass_has_other_collectives(
    world_size: int, case: str, tmp_path: Path
) -> None:
    codes, found = run(world_size, case, tmp_path)

    assert codes == [1] * world_size
    for rank, result in found.items():
        assert result["seconds"] < LIMIT_SECONDS
        if rank == FAILING_RANK:
            assert result["error"] == "OutOfMemoryError"
        else:
            assert result["error"] == "PeerFailedError"
            assert "rank 1 with OutOfMemoryError" in result["text"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["another size", "not recorded"])
def test_the_processes_end_soon_if_gloo_aborts_one_of_them(case: str, tmp_path: Path) -> None:
    codes, found = run(2, case, tmp_path)

    assert {file.name for file in tmp_path.glob("began-*")} == {"began-0", "began-1"}
    assert all(codes)
    assert -signal.SIGKILL not in codes  # all have ended by themselves
    assert all(result["seconds"] < LIMIT_SECONDS for result in found.values())


@pytest.mark.slow
def test_a_failed_rank_waits_for_ranks_that_are_slow_but_issue_the_same(tmp_path: Path) -> None:
    codes, found = run(2, "as before, slow", tmp_path)

    assert codes == [0, 0]
    assert [found[rank]["error"] for rank in range(2)] == ["NoneType"] * 2
