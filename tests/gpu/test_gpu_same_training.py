"""Monitoring does not change training on GPUs, and counts the calls of the Flight Recorder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chosen_cases import chosen
from gpu.rank_jobs import FLIGHT_RECORDER, run_job
from scripts.launching import SCRIPTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CONFIGURATIONS = (
    "stage 0",
    "stage 1",
    "stage 2",
    "stage 2, reduce per owner",
    "stage 3",
    "stage 2, optimizer on cpu",
    "stage 3, optimizer on cpu",
)
each_configuration = pytest.mark.parametrize("name", CONFIGURATIONS)
each_number_of_ranks = pytest.mark.parametrize(
    "num_ranks",
    [
        pytest.param(1, id="one"),
        pytest.param(
            2,
            id="several",
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
        ),
    ],
)

Results = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Results:
    script = str(SCRIPTS / "monitor" / "compare_monitored.py")
    return {
        num_ranks: run_job(
            script,
            tmp_path_factory.mktemp("compared"),
            *CONFIGURATIONS,
            world_size=num_ranks,
            variables=FLIGHT_RECORDER,
        )
        for num_ranks in chosen(request, "num_ranks")
        if torch.cuda.device_count() >= num_ranks
    }


@each_number_of_ranks
@each_configuration
def test_final_weights_are_bitwise_equal_with_and_without_a_watch(
    results: Results, name: str, num_ranks: int
) -> None:
    for rank in results[num_ranks]:
        assert rank[name]["trained"]
        assert rank[name]["bitwise_equal"]


@each_number_of_ranks
@each_configuration
def test_calls_and_bytes_equal_the_flight_recorders(
    results: Results, name: str, num_ranks: int
) -> None:
    for rank in results[num_ranks]:
        assert rank[name]["flight_calls"]["all_gather"] > 0
        assert rank[name]["our_calls"] == rank[name]["flight_calls"]
        assert rank[name]["our_bytes"] == rank[name]["flight_bytes"]


@each_number_of_ranks
@each_configuration
def test_every_collective_is_covered_in_every_step(
    results: Results, name: str, num_ranks: int
) -> None:
    for rank in results[num_ranks]:
        assert rank[name]["steps"] == 20
        assert rank[name]["coverage"] == [1.0] * 20
