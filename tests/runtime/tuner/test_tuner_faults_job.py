"""What goes wrong on one rank while all change a real run: all end on what worked before."""

from __future__ import annotations

from typing import Any

import pytest
from scripts.separate_ranks import Ended, run_apart

pytestmark = pytest.mark.jobs

STAGES = ["stage 0", "stage 2", "stage 3"]
OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"
REASONS = {
    "refused": "no room",
    "apply fails": "no",
    "out of memory half way": f"RuntimeError: {OUT_OF_MEMORY}",
    "an attribute is gone": "AttributeError: gone",
    "verify disagrees": "what was set does not read back",
    "values cannot be read": "KeyError: 'state'",
    "no engine to be had": "the engine could not be made with the new ds config",
    "out of memory after a rebuild": f"the engine was rebuilt back: {OUT_OF_MEMORY}",
    "verify disagrees after a rebuild": "what was set does not read back",
}
ON_THREE_RANKS = ["refused", "out of memory half way", "verify disagrees"]
REBUILT_ON_THREE = "out of memory after a rebuild"
SECONDS_TO_RAISE = 60.0  # half a second where nobody else uses the machine; gloo's own limit: 1800


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    folder = tmp_path_factory.mktemp("faults")
    ranks = run_apart("tuner_faults_job.py", folder, world_size=2, arguments=("0,2,3", "apply"))
    assert all("stage 3" in rank.told for rank in ranks), ranks[0].last_words
    return ranks


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    folder = tmp_path_factory.mktemp("faults-of-three")
    ranks = run_apart("tuner_faults_job.py", folder, world_size=3, arguments=("2", "verify"))
    assert all("stage 2" in rank.told for rank in ranks), ranks[0].last_words
    return ranks


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fault", REASONS)
def test_after_a_fault_on_one_rank_both_work_as_before(two_ranks, fault: str, stage: str):
    check_fault([rank.told[stage][fault] for rank in two_ranks], REASONS[fault])


@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_with_the_bits_of_a_run_that_nobody_touched(two_ranks, stage: str):
    assert [rank.told[stage]["bitwise"] for rank in two_ranks] == [True, True]


def test_where_a_rank_dies_the_other_raises_and_works_as_before(two_ranks):
    survivor, dead = two_ranks

    assert dead.returncode == 9
    check_survivor(survivor)


@pytest.mark.parametrize("fault", [*ON_THREE_RANKS, REBUILT_ON_THREE])
def test_of_three_ranks_all_work_as_before_whichever_failed(three_ranks, fault: str):
    check_fault([rank.told["stage 2"][fault] for rank in three_ranks], REASONS[fault])


def test_three_ranks_train_on_with_the_same_bits(three_ranks):
    assert [rank.told["stage 2"]["bitwise"] for rank in three_ranks] == [True] * 3


def test_where_one_of_three_dies_both_others_raise_and_work_as_before(three_ranks):
    *survivors, dead = three_ranks

    assert dead.returncode == 9
    for survivor in survivors:
        check_survivor(survivor)


def check_fault(found: list[dict[str, Any]], reason: str) -> None:
    """Of all ranks the last failed; all must tell so, and be as before."""
    told = f"rank {len(found) - 1}: {reason}"
    for rank in found:
        assert (rank["done"], rank["undone"], rank["same"]) == (False, True, True)
        assert rank["reason"].startswith(told)
        assert rank["values"] == found[0]["values"]


def check_survivor(rank: Ended) -> None:
    death = rank.told["death"]
    assert rank.returncode == 0
    assert death["raised"] == "RuntimeError"
    assert death["same"]
    assert death["values"] == death["before"]
    assert death["seconds"] < SECONDS_TO_RAISE
