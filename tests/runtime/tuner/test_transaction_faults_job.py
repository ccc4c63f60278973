"""Faults of one rank during a switch of a real run: all ranks end as before."""

from __future__ import annotations

from typing import Any

import pytest
from chosen_cases import chosen, tiers
from scripts.separate_ranks import RankResult, outputs, run_apart

pytestmark = pytest.mark.jobs

STAGES = tiers(["stage 0", "stage 2", "stage 3"], quick=["stage 0", "stage 3"])
OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"
REASONS = {
    "refused": "no room",
    "apply fails": "no",
    "out of memory half way": f"RuntimeError: {OUT_OF_MEMORY}",
    "an attribute is gone": "AttributeError: gone",
    "verify disagrees": "the values read back are not those set",
    "values cannot be read": "KeyError: 'state'",
    "no engine to be had": "the engine could not be made with the new ds config",
    "out of memory after a rebuild": f"rebuild rolled back: {OUT_OF_MEMORY}",
    "verify disagrees after a rebuild": "the values read back are not those set",
}
ON_THREE_RANKS = ["refused", "out of memory half way", "verify disagrees"]
REBUILT_ON_THREE = "out of memory after a rebuild"
SECONDS_TO_RAISE = 60.0  # half a second where nobody else uses the machine; gloo's own limit: 1800


@pytest.fixture(scope="module")
def two_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[RankResult]:
    folder = tmp_path_factory.mktemp("faults")
    stages = sorted(chosen(request, "stage")) or ["stage 3"]
    numbers = ",".join(stage.removeprefix("stage ") for stage in stages)
    ranks = run_apart(
        "tuner/tuner_faults_job.py", folder, world_size=2, arguments=(numbers, "apply")
    )
    assert all(stages[-1] in rank.report for rank in ranks), outputs(ranks)
    return ranks


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[RankResult]:
    folder = tmp_path_factory.mktemp("faults-of-three")
    ranks = run_apart("tuner/tuner_faults_job.py", folder, world_size=3, arguments=("2", "verify"))
    assert all("stage 2" in rank.report for rank in ranks), outputs(ranks)
    return ranks


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fault", REASONS)
def test_after_a_fault_on_one_rank_both_are_as_before(two_ranks, fault: str, stage: str):
    check_fault([rank.report[stage][fault] for rank in two_ranks], REASONS[fault])


@pytest.mark.parametrize("stage", STAGES)
def test_training_continues_bitwise_equal_to_a_run_without_switches(two_ranks, stage: str):
    assert [rank.report[stage]["bitwise"] for rank in two_ranks] == [True, True]


def test_if_a_rank_dies_the_other_raises_and_is_as_before(two_ranks):
    survivor, dead = two_ranks

    assert dead.returncode == 9
    check_survivor(survivor)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*ON_THREE_RANKS, REBUILT_ON_THREE])
def test_after_a_fault_on_one_of_three_ranks_all_are_as_before(three_ranks, fault: str):
    check_fault([rank.report["stage 2"][fault] for rank in three_ranks], REASONS[fault])


@pytest.mark.slow
def test_three_ranks_continue_bitwise_equal(three_ranks):
    assert [rank.report["stage 2"]["bitwise"] for rank in three_ranks] == [True] * 3


@pytest.mark.slow
def test_if_one_of_three_dies_both_others_raise_and_are_as_before(three_ranks):
    *survivors, dead = three_ranks

    assert dead.returncode == 9
    for survivor in survivors:
        check_survivor(survivor)


def check_fault(found: list[dict[str, Any]], reason: str) -> None:
    """The last rank failed; all ranks must have its reason, and be as before."""
    expected = f"rank {len(found) - 1}: {reason}"
    for rank in found:
        assert (rank["done"], rank["undone"], rank["same"]) == (False, True, True)
        assert rank["reason"].startswith(expected)
        assert rank["values"] == found[0]["values"]


def check_survivor(rank: RankResult) -> None:
    death = rank.report["death"]
    assert rank.returncode == 0
    assert death["raised"] == "RuntimeError"
    assert death["same"]
    assert death["values"] == death["before"]
    assert death["seconds"] < SECONDS_TO_RAISE
