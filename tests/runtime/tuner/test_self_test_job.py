"""Whether a knob is bit-exact, as told by passes that are dropped, is what training comes to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts.launching import SCRIPTS
from scripts.ranks import start_ranks

pytestmark = pytest.mark.jobs

# The order of a sum of two does not matter; how a batch is cut does.
CASES = {2: ("stage 1", "stage 2, offload"), 4: ("stage 2", "stage 3")}
RANKS_AND_CASES = [(ranks, case) for ranks, cases in CASES.items() for case in cases]
CUT = "micro_batch_samples"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict]]:
    return {ranks: told_by(ranks, tmp_path_factory.mktemp(f"ranks_{ranks}")) for ranks in CASES}


def told_by(ranks: int, folder: Path) -> list[dict]:
    script = SCRIPTS / "self_test_checks.py"
    finished = start_ranks(ranks, script, folder, *CASES[ranks], cwd=folder)
    files = [folder / f"rank-{rank}.json" for rank in range(ranks)]
    assert all(file.exists() for file in files), finished.stderr[-3000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize(("ranks", "case"), RANKS_AND_CASES)
def test_what_is_found_exact_is_what_training_shows_to_be(told, ranks: int, case: str):
    for rank in told[ranks]:
        assert rank[case]["exact"] == rank[case]["truly"]


@pytest.mark.parametrize(("ranks", "case"), RANKS_AND_CASES)
def test_a_run_that_tested_itself_comes_out_as_one_that_did_not(told, ranks: int, case: str):
    for rank in told[ranks]:
        assert rank[case]["moved"] == []


def test_on_two_ranks_all_but_the_cut_of_a_batch_is_exact(told):
    for case in CASES[2]:
        assert told[2][0][case]["exact"] == sorted(set(told[2][0][case]["tried"]) - {CUT})


def test_on_four_ranks_a_bucket_size_is_not_exact_where_gloo_cuts_sums_by_it(told):
    assert "reduce_bucket_size" not in told[4][0]["stage 2"]["exact"]
    assert "overlap_comm" in told[4][0]["stage 2"]["exact"]
