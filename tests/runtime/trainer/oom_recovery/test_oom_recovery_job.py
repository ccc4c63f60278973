"""Tests of out-of-memory errors in real engines: equal to a run with the smaller size.

A sample of the cases; `make bench-oom` runs all of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chosen_cases import chosen, tiers
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS
from scripts.trainer.recovery_cases import FEW_ALONE, FEW_ENGINES, FEW_FAULTS

pytestmark = pytest.mark.jobs

RUNS = tiers(
    [(2, name) for name in FEW_ENGINES] + [(1, name) for name in FEW_ALONE],
    quick=[(2, "stage 3, all on host"), (1, "stage 2, overlapping")],
)

Found = list[dict]


def run(world_size: int, folder: Path, script: str, *arguments: str) -> Found:
    """Run a script; return what each rank writes."""
    finished = start_ranks(
        world_size,
        SCRIPTS / "trainer" / script,
        folder,
        *arguments,
        cwd=folder,
    )
    files = [folder / f"rank-{rank}.json" for rank in range(world_size)]
    assert all(file.exists() for file in files), finished.stderr[-5000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def matrix(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Found]:
    names: dict[int, list[str]] = {}
    for world_size, name in chosen(request, "world_size", "name"):
        names.setdefault(world_size, []).append(name)
    return {
        world_size: run(
            world_size,
            tmp_path_factory.mktemp("matrix"),
            "recovery_matrix.py",
            "few",
            *names[world_size],
        )
        for world_size in names
    }


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(2, tmp_path_factory.mktemp("ends"), "recovery_ends.py")


@pytest.mark.parametrize(("world_size", "name"), RUNS)
def test_each_window_is_replayed_with_the_size_that_fits(
    matrix: dict[int, Found], name: str, world_size: int
) -> None:
    for rank in matrix[world_size]:
        windows = rank[name]["windows"]
        assert len(windows) == len([f for f in FEW_FAULTS if world_size == 2 or f.ranks == "all"])
        for window in windows:
            assert window["replays"] >= 1, window
            assert max(window["sizes"]) == max(window["then"]) == window["expected"], window


@pytest.mark.parametrize(("world_size", "name"), RUNS)
def test_training_equals_a_run_with_these_sizes_from_the_start(
    matrix: dict[int, Found], name: str, world_size: int
) -> None:
    for rank in matrix[world_size]:
        assert rank[name]["same weights"]
        assert all(rank[name]["same losses"])


@pytest.mark.parametrize(("world_size", "name"), RUNS)
def test_every_sample_is_trained_on_once(
    matrix: dict[int, Found], name: str, world_size: int
) -> None:
    assert all(rank[name]["samples once"] for rank in matrix[world_size])


def test_the_state_of_adam_exists_before_the_first_step(matrix: dict[int, Found]) -> None:
    for rank in matrix[2]:
        assert all(found["states at start"] > 0 for found in rank.values())


def test_a_single_rank_holds_no_votes(matrix: dict[int, Found]) -> None:
    assert all(found["votes"] == 0 for found in matrix[1][0].values())


@pytest.mark.parametrize("name", ["stage 1", "stage 3, small buckets"])
def test_each_rank_raises_and_the_run_is_unchanged_with_no_memory_saving_left(
    ends: Found, name: str
) -> None:
    peer, own = (rank["gives up"][name] for rank in ends)

    assert peer["type"] == "PeerOutOfMemoryError"
    assert "no memory saving left" in peer["text"]
    assert own["type"] == "RuntimeError"
    assert "DefaultCPUAllocator" in own["text"]
    assert own["steps"] == peer["steps"] == 1
    assert own["intact"]
    assert peer["intact"]


def test_memory_savings_are_applied_if_one_sample_does_not_fit(ends: Found) -> None:
    for rank in ends:
        found = rank["escalates"]
        assert found["asked"] == ["ACTIVATION_CHECKPOINTING", "MINIMAL_BUCKETS"]
        assert set(found["sizes"]) == {1}
        assert found["replays"] == 3


@pytest.mark.parametrize("name", ["stage 2", "stage 3"])
def test_an_unguarded_window_is_replayed_if_all_ranks_ran_out(ends: Found, name: str) -> None:
    for rank in ends:
        found = rank["all run out, no votes"][name]
        assert found["replays"] == 1
        assert found["votes"] > 0  # in the replay, which is guarded


def test_an_unguarded_window_without_collectives_is_replayed_if_one_rank_ran_out(
    ends: Found,
) -> None:
    for rank in ends:
        found = rank["one runs out, no votes"]
        assert found["replays"] == 1
        assert found["votes"] >= 2


def test_an_unguarded_window_is_replayed_if_the_ranks_ran_out_in_different_places(
    ends: Found,
) -> None:
    assert [rank["in two places, no votes"]["replays"] for rank in ends] == [1, 1]
