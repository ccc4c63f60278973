"""Monitoring does not change training, and counts the same calls as the Flight Recorder."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chosen_cases import chosen, tiers
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

pytestmark = pytest.mark.jobs

CONFIGURATIONS = (
    "stage 0",
    "stage 1",
    "stage 2",
    "stage 2, reduce per owner",
    "stage 3",
    "stage 2, optimizer on cpu",
    "stage 3, optimizer on cpu",
)
QUICK = ("stage 0", "stage 1", "stage 2, reduce per owner", "stage 3, optimizer on cpu")
each_configuration = pytest.mark.parametrize("name", tiers(CONFIGURATIONS, QUICK))


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, Any]]:
    names = chosen(request, "name")
    folder = tmp_path_factory.mktemp("compared")
    script, variables = (
        SCRIPTS / "monitor" / "compare_monitored.py",
        {"TORCH_FR_BUFFER_SIZE": "100000"},
    )

    finished = start_ranks(2, script, folder, *names, cwd=folder, variables=variables)

    assert finished.returncode == 0, finished.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


@each_configuration
def test_final_weights_are_bitwise_equal_with_and_without_a_watch(results, name):
    for rank in results:
        assert rank[name]["trained"]
        assert rank[name]["bitwise_equal"]


@each_configuration
def test_calls_and_bytes_equal_the_flight_recorders(results, name):
    for rank in results:
        assert rank[name]["flight_calls"]["all_gather"] > 0
        assert rank[name]["our_calls"] == rank[name]["flight_calls"]
        assert rank[name]["our_bytes"] == rank[name]["flight_bytes"]


@each_configuration
def test_every_collective_is_covered_in_every_step(results, name):
    for rank in results:
        assert rank[name]["steps"] == 4
        assert rank[name]["coverage"] == [1.0] * 4
