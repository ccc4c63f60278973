"""What needs NCCL between two GPUs: a slow GPU, contexts, and errors that meet other ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.rank_jobs import run_job
from scripts.launching import SCRIPTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 NVIDIA GPUs"),
]

Record = Callable[[str, object], None]
ENGINES = ("stage 2, overlapping", "stage 3, eager prefetching")


def test_a_slow_gpu_is_a_straggler_in_the_phase_in_which_it_is_slow(
    tmp_path: Path, record_property: Record
) -> None:
    fast, slow = run_job("straggler_job.py", tmp_path, world_size=2)

    record_property("scores", {"fast": fast["scores"], "slow": slow["scores"]})
    assert fast["failures"] == slow["failures"] == {}
    added = statistics.median(slow["forward"]) - statistics.median(fast["forward"])
    assert added == pytest.approx(0.020, rel=0.1)
    assert max(slow["scores"].items(), key=lambda item: item[1])[0] == "forward"
    assert slow["scores"]["forward"] > 0.05 > fast["scores"]["forward"]


def test_no_thread_of_a_rank_makes_a_context_on_the_gpu_of_another_rank(tmp_path: Path) -> None:
    first, second = run_job("contexts_job.py", tmp_path, world_size=2)

    assert first["failures"] == second["failures"] == {}
    assert first["logged"] > 0
    if second["before"] != [1]:
        pytest.skip("rank 1 has a context on GPU 0 without monitoring: this shows nothing")
    assert (first["during"], second["during"]) == ([0], [1])
    assert (first["after"], second["after"]) == ([0], [1])
    assert second["after use of GPU 0"] == [0, 1], "contexts are not found: this shows nothing"
    if first["pid"] in first["pids on GPU 0"]:
        assert second["pid"] not in first["pids on GPU 0"]


def test_a_hang_in_nccl_is_reported_with_the_rank_that_is_missing(
    tmp_path: Path, record_property: Record
) -> None:
    found, other = run_job("hang_job.py", tmp_path, world_size=2)

    record_property("records", found["recorded"])
    assert found["failures"] == {}
    for before, after in (found["contexts"], other["contexts"]):
        assert after == before  # the threads that write reports make none
    assert "rank 1 has not arrived" in found["reports"]["hang-rank-0-1.txt"]


@pytest.mark.parametrize("name", ENGINES)
def test_an_error_on_one_rank_is_replayed_on_all(name: str, tmp_path: Path) -> None:
    script = str(SCRIPTS / "trainer" / "recovery_matrix.py")

    ranks = run_job(script, tmp_path, "few", name, world_size=2)

    for rank in ranks:
        assert all(window["replays"] >= 1 for window in rank[name]["windows"])
        assert rank[name]["same weights"]
        assert rank[name]["samples once"]


def test_unguarded_windows_do_not_hang_nccl(tmp_path: Path, record_property: Record) -> None:
    ranks: list[dict[str, Any]] = run_job(
        str(SCRIPTS / "trainer" / "recovery_ends.py"), tmp_path, world_size=2
    )

    for rank in ranks:
        record_property("without votes", rank["all run out, no votes"])
        assert all(each["replays"] == 1 for each in rank["all run out, no votes"].values())
        assert rank["one runs out, no votes"]["replays"] == 1
