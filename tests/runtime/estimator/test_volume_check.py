"""Tests of the wire bytes of a step against the reference of its ZeRO stage, in a real job."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chosen_cases import chosen, tiers
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

pytestmark = pytest.mark.jobs

# With G = P, both in fp32, and gloo's reduce_scatter, which sends what an all_reduce does:
# stage 2 (2 A G + P) / (A G + P); stage 3, where parameters stay gathered between forward and
# backward, (P + 2 G) / (2 P + G).
EXPECTED = {
    "stage 0": 1.0,
    "stage 1": 1.5,
    "stage 1, accumulation 4": 1.5,
    "stage 2": 1.5,
    "stage 2, accumulation 4": 1.8,
    "stage 3": 1.0,
}
QUICK = ("stage 0", "stage 1, accumulation 4", "stage 2", "stage 3")
each_case = pytest.mark.parametrize("case", tiers(EXPECTED, QUICK))


@pytest.fixture(scope="module")
def ranks(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, Any]]:
    names = {*chosen(request, "case"), "stage 2", "own collectives"}
    folder = tmp_path_factory.mktemp("volume")
    script = SCRIPTS / "estimator" / "volume_job.py"

    finished = start_ranks(2, script, folder, *sorted(names), cwd=folder)

    assert finished.returncode == 0, finished.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


@each_case
def test_the_volume_ratio_is_the_one_of_the_zero_stage(ranks, case):
    for rank in ranks:
        assert rank[case]["ratio"] == pytest.approx(EXPECTED[case], rel=0.02)


@each_case
def test_predicted_wire_bytes_equal_measured_ones(ranks, case):
    for rank in ranks:
        assert rank[case]["wire"]["measured"] == rank[case]["wire"]["predicted"]
        assert rank[case]["lines"] == []


def test_unplanned_collectives_are_logged_once_by_one_rank(ranks):
    first, second = (rank["own collectives"] for rank in ranks)

    assert first["wire"]["measured"] > first["wire"]["predicted"]
    (line,) = first["lines"]
    assert "all_reduce 3 calls of" in line
    assert second["lines"] == []


def test_changed_knobs_are_estimated_and_compression_is_not_logged(ranks):
    for rank in ranks:
        configured, turned = rank["stage 2"]["wire"], rank["turned"]["turned"]
        assert turned["measured"] == turned["predicted"] != configured["predicted"]
        assert rank["turned"]["compressed"]["measured"] < turned["measured"] / 2
        assert rank["turned"]["lines"] == []
