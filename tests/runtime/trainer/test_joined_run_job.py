"""Tests of a TrainingRun with several changes during training: engine, compression, memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

pytestmark = pytest.mark.jobs

ALL_SAMPLES = 64


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("joined")
    finished = start_ranks(2, SCRIPTS / "trainer" / "joined_checks.py", folder, cwd=folder)
    files = [folder / f"rank-{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), finished.stderr[-3000:]
    return [json.loads(file.read_text()) for file in files]


def test_two_rebuilds_do_not_change_the_training(found):
    for rank in found:
        assert rank["rebuilt"]["stage"] == 2
        assert rank["rebuilt"]["difference"] <= 1e-6
        assert rank["rebuilt"]["samples"] == ALL_SAMPLES


def test_metrics_continue_over_rebuilds_and_count_them(found):
    first = found[0]["rebuilt"]

    assert (first["rebuilt"], first["refused"], first["published steps"]) == (2, 2, 4)
    assert found[1]["rebuilt"]["published steps"] == 4


def test_a_rebuild_that_leaves_no_engine_has_the_error_of_the_failed_rank_on_all_ranks(found):
    (peer, peer_later), (own, later) = (rank["lost"]["errors"] for rank in found)

    assert own == ["RuntimeError", "no state can be restored"]
    assert peer[0] == "PeerFailedError"
    assert "rank 1 with RuntimeError: no state can be restored" in peer[1]
    for kind, text in (peer_later, later):
        assert kind == "ZerowatchError"
        assert "load the last checkpoint" in text


def test_an_unknown_stage_is_rejected_on_all_ranks_without_effect(found):
    for rank in found:
        error = rank["rebuilt"]["errors"][0]
        assert error.startswith("the engine was not rebuilt: ")
        assert "stage must be 0, 1, 2 or 3, got 7" in error


def test_a_wrong_rebuild_on_one_rank_is_rejected_on_all(found):
    peer, own = (rank["rebuilt"]["errors"][1] for rank in found)

    assert "another rank refused" in peer
    assert "stage must be 0, 1, 2 or 3, got 7" in own


def test_compression_and_activation_checkpointing_are_attached_to_the_new_engine(found):
    for rank in found:
        assert rank["rebuilt, with more"]["compressor"]
        assert rank["rebuilt, with more"]["difference"] < 1e-3


def test_where_one_sample_does_not_fit_memory_savings_are_applied_until_it_does(found):
    for rank in found:
        case = rank["starved"]
        assert case["stage"] == 3
        assert case["errors"] == []
        assert case["each"] == [0, 0, 3, 0]
        assert case["difference"] <= 1e-6
        assert case["samples"] == ALL_SAMPLES
    assert found[0]["starved"]["replays"] == 3
    assert found[1]["starved"]["survived"] == 3


def test_samples_of_windows_that_were_replayed_or_aborted_are_counted_once(found):
    for rank in found:
        for case in ("starved", "starved for good"):
            assert rank[case]["published samples"] == ALL_SAMPLES / 2


def test_with_no_memory_saving_left_each_rank_raises_and_may_go_on(found):
    first, second = (rank["starved for good"] for rank in found)

    assert first["errors"][0].startswith("PeerOutOfMemoryError: out of memory on rank 1")
    assert second["errors"][0].startswith(
        "RuntimeError: DefaultCPUAllocator: can't allocate memory"
    )
    for case in (first, second):
        assert case["difference"] <= 1e-6
        assert case["samples"] == ALL_SAMPLES
        assert case["plan"]["failures"] == [{"length": 6, "samples": 1}]
    assert first["gave up"] == 1


def test_a_rebuilt_run_is_loaded_by_a_run_of_the_first_configuration(found):
    for rank in found:
        assert rank["saved"]["stage"] == 3
        assert rank["saved"]["difference"] <= 1e-6
        assert rank["saved"]["client_state"] == {"note": "mine"}
        assert rank["saved"]["loaded"] == 2
        assert rank["saved"]["samples"] == ALL_SAMPLES
