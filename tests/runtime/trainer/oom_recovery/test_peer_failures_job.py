"""Tests of script errors on one rank: every rank raises an error, and the run continues."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

pytestmark = pytest.mark.jobs

STAGES = ("stage 0", "stage 2", "stage 3")
ENDS = {"failed update": "KeyError", "failed gather": "RuntimeError"}
TYPES = {
    "before the model": "ValueError",
    "in an evaluation": "ValueError",
    "in the model": "RuntimeError",
    "after the model": "KeyError",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("peers")
    finished = start_ranks(2, SCRIPTS / "trainer" / "peer_failures.py", folder, cwd=folder)
    files = [folder / f"rank-{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), finished.stderr[-5000:]
    ranks = [json.loads(file.read_text()) for file in files]
    assert all(rank.keys() >= {*STAGES, *ENDS} for rank in ranks), finished.stderr[-5000:]
    return ranks


@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_rank_raises_its_own_error_and_the_others_name_it(found, stage):
    peer, own = (rank[stage]["failures"] for rank in found)

    assert len(own) == len(peer) >= 7
    for name, error in own.items():
        expected = TYPES[name.split(",")[0]]
        assert error["type"] == expected, name
        assert peer[name]["type"] == "PeerFailedError", name
        assert (peer[name]["rank"], peer[name]["error type"]) == (1, expected)
        assert peer[name]["can continue"]
        assert expected in peer[name]["text"]
        assert error["text"][:60] in peer[name]["text"]
    assert "a bad sample" in peer["before the model, window 1"]["text"]


@pytest.mark.parametrize("stage", STAGES)
def test_after_a_failure_on_one_rank_the_run_is_as_before_on_all(found, stage):
    for rank in found:
        assert all(error["counts kept"] for error in rank[stage]["failures"].values())
        assert rank[stage]["same weights"]


@pytest.mark.parametrize(
    ("case", "differences"),
    [
        ("length", ["num_samples", "64 on rank 0", "65 on rank 1"]),
        ("seed", ["seed", "0 on rank 0", "1 on rank 1"]),
        ("batch", ["batch_samples", "8 on rank 0", "16 on rank 1"]),
        ("shuffle", ["shuffle"]),
        ("stream", ["an IterableDataset"]),
    ],
)
def test_data_that_differs_between_ranks_is_refused_on_all(found, case, differences):
    for rank in found:
        assert rank["loaders"][case].startswith("ValueError: ")
        for difference in differences:
            assert difference in rank["loaders"][case]


def test_an_error_of_one_ranks_dataset_is_raised_on_all(found):
    peer, own = (rank["loaders"]["own error"] for rank in found)

    assert own.startswith("ValueError: a dataset has __len__")
    assert peer.startswith("PeerFailedError: loader failed on rank 1 with ValueError")


def test_equal_data_is_accepted(found):
    for rank in found:
        assert rank["loaders"]["equal"] == rank["loaders"]["equal streams"] == ""


def test_a_position_that_differs_between_ranks_is_refused_on_all(found):
    for rank in found:
        assert rank["positions"].startswith("CheckpointError: ")
        assert "position" in rank["positions"]
        assert "0 on rank 0 and 1 on rank 1" in rank["positions"]


@pytest.mark.parametrize(("case", "error_type"), ENDS.items())
def test_a_failure_that_the_ranks_cannot_leave_together_ends_the_run_on_all(
    found, case, error_type
):
    peer, own = (rank[case] for rank in found)

    assert [each["type"] for each in own] == [error_type, "ZerowatchError", "ZerowatchError"]
    assert error_type in own[1]["text"]
    assert "last checkpoint" in own[1]["text"]
    # An update without collectives succeeds on the other ranks.
    ended = [each for each in peer if each["type"] is not None]
    assert len(ended) >= 2
    for each in ended:
        assert each["type"] == "PeerFailedError"
        assert (each["rank"], each["error type"]) == (1, error_type)
        assert not each["can continue"]
        assert "last checkpoint" in each["text"]
