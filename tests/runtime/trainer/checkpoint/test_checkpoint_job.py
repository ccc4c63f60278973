"""Tests of checkpoints of real engines: a resumed run is bitwise equal to a continuous run."""

from __future__ import annotations

import json

import pytest
from chosen_cases import chosen, tiers
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

pytestmark = pytest.mark.jobs

FLOAT16 = (
    *("float16 autocast, int8", "float16 autocast, stage 1"),
    *("float16 autocast, stage 2", "float16 autocast, stage 3"),
)
ENGINES = (
    *("stage 0", "stage 1", "stage 2", "stage 3", "stage 1, int8", "stage 3, nothing kept"),
    *("stage 2, offload", "stage 3, offload", "bf16, stage 0", "bf16, stage 2", "BF16_Optimizer"),
    *FLOAT16,
)
QUICK = (
    *("stage 0", "stage 1, int8", "stage 2", "stage 3, offload", "BF16_Optimizer"),
    *FLOAT16,
)


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("resume")
    names = chosen(request, "name")
    finished = start_ranks(2, SCRIPTS / "trainer" / "resume_checks.py", folder, *names, cwd=folder)
    files = [folder / f"rank-{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), finished.stderr[-3000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("who", ["new engine", "same engine", "background"])
@pytest.mark.parametrize("name", tiers(ENGINES, quick=QUICK))
def test_a_run_resumes_from_its_checkpoint_bit_for_bit(
    ranks: list[dict], name: str, who: str
) -> None:
    for rank in ranks:
        found = rank[name]
        assert found[who] == found["through"]
        assert len(found["through"]["losses"]) == 3


@pytest.mark.parametrize("name", FLOAT16)
def test_updates_that_a_grad_scaler_skips_are_counted_and_none_is_skipped_after_a_restart(
    ranks: list[dict], name: str
) -> None:
    skipped = [rank[name][who]["skipped"] for rank in ranks for who in ("through", "new engine")]

    assert skipped == [3] * 4


@pytest.mark.parametrize("name", tiers(ENGINES, quick=QUICK))
def test_a_save_in_the_background_writes_the_same_files(ranks: list[dict], name: str) -> None:
    assert all(rank[name]["same files"] for rank in ranks)


@pytest.mark.parametrize("name", tiers(ENGINES, quick=QUICK))
def test_a_save_in_the_background_counts_what_it_copies_to_the_host_and_no_gradients(
    ranks: list[dict], name: str
) -> None:
    for rank in ranks:
        copied = rank[name]["copied"]
        assert copied["counted"] == copied["copied"] > 0
        assert (copied["gradients"], copied["elsewhere"]) == (0, 0)


def test_loading_before_the_first_checkpoint_returns_none_and_save_returns_a_folder(
    ranks: list[dict],
) -> None:
    found = ranks[1]["stage 2"]

    assert found["begun"] == [None, 0]
    assert found["saved"] == "step-00000003"


def test_a_run_with_a_rebuilt_engine_resumes_at_its_zero_stage(ranks: list[dict]) -> None:
    for rank in ranks:
        assert rank["rebuilt"]["plan"] == [3, {"zero_optimization": {"stage": 3}}]
        assert (rank["rebuilt"]["stage"], rank["rebuilt"]["clip"]) == (3, 0.25)
        assert rank["rebuilt"]["new engine"] == rank["rebuilt"]["through"]
        assert rank["rebuilt"]["earlier"] == [1, 1]  # step and stage of a checkpoint before it


def test_a_stream_without_a_state_resumes_several_times_bit_for_bit(ranks: list[dict]) -> None:
    for rank in ranks:
        through, resumed = rank["streams"]
        assert len(through["losses"]) == 6
        assert resumed == through


def test_a_full_disk_on_one_rank_raises_on_all_and_leaves_the_previous_checkpoint(
    ranks: list[dict],
) -> None:
    errors = [rank["refusals"] for rank in ranks]

    assert (
        "failed on rank 1, whose error has the reason. Earlier checkpoints are unchanged"
        in errors[0]["full disk"]
    )
    reason = "zerowatch-rank-00001.pt cannot be written; is the disk full?"
    assert reason in errors[1]["full disk"]
    for each in errors:
        assert "rank 1 failed with" in each["full disk, background"]
        assert reason in each["full disk, background"]
    assert errors[0]["left"] == "step-00000001"
    assert errors[0]["step"] == "1"


def test_after_a_failure_on_its_thread_the_next_save_is_made_and_then_raises_the_failure(
    ranks: list[dict],
) -> None:
    for each in (rank["refusals"] for rank in ranks):
        assert "rank 1 failed with" in each["save after a failure"]
        assert "step-00000002 was saved" in each["save after a failure"]
        assert each["saved after a failure"] == "step-00000002"


def test_if_one_rank_can_start_no_thread_all_wait_for_the_save(ranks: list[dict]) -> None:
    for rank in ranks:
        assert rank["refusals"]["saved without a thread"] == "step-00000002-2"


def test_loading_keeps_the_gradient_clipping_of_the_ds_config(ranks: list[dict]) -> None:
    assert ranks[0]["refusals"]["clip"] == "0.25"


def test_state_that_cannot_be_saved_or_loaded_raises_on_every_rank(ranks: list[dict]) -> None:
    errors = [rank["refusals"] for rank in ranks]

    assert all("client_state is of type builtins.type" in each["object"] for each in errors)
    assert all("with 1 as ZeRO stage, this run has 2" in each["stage"] for each in errors)
    damaged = "zerowatch-rank-00001.pt has changed since it was written"
    assert sorted(damaged in each["damaged"] for each in errors) == [False, True]
    assert "zerowatch-rank-00001.pt cannot be read" in errors[1]["damaged"]


@pytest.mark.parametrize("engine", [0, 1], ids=["stage 2", "stage 3"])
def test_a_load_that_fails_on_one_rank_fails_on_all_and_an_older_checkpoint_can_be_loaded(
    ranks: list[dict], engine: int
) -> None:
    first, second = (rank["failed loads"][engine] for rank in ranks)

    assert "failed on rank 1, whose error has the reason. The engine may" in first["unreadable"]
    assert "DeepSpeed cannot load" in second["unreadable"]
    assert "stale file handle" in second["unreadable"]
    for found in (first, second):
        assert found["damaged"]
        assert found["not allowed"]
        assert found["older"] == [1, 1, 1]
        assert found["restartable"] == 1
        assert found["trained"] == 6
        assert found["left"] == ["step-00000001", "step-00000006"]  # not the damaged one
