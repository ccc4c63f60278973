"""A TrainingRun changed under way in several ways at once: engine, codec, memory, saves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts.launching import SCRIPTS
from scripts.ranks import start_ranks

pytestmark = pytest.mark.jobs

ALL_SAMPLES = 64


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("joined")
    finished = start_ranks(2, SCRIPTS / "joined_checks.py", folder, cwd=folder)
    files = [folder / f"rank-{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), finished.stderr[-3000:]
    return [json.loads(file.read_text()) for file in files]


def test_two_rebuilds_leave_the_training_as_it_was(told):
    for rank in told:
        assert rank["rebuilt"]["stage"] == 2
        assert rank["rebuilt"]["apart"] <= 1e-6
        assert rank["rebuilt"]["samples"] == ALL_SAMPLES


def test_metrics_go_on_over_rebuilds_and_count_them(told):
    first = told[0]["rebuilt"]

    assert (first["rebuilt"], first["refused"], first["steps told"]) == (2, 1, 4)
    assert told[1]["rebuilt"]["steps told"] == 4


def test_a_stage_that_is_none_is_refused_on_all_ranks_and_harms_nothing(told):
    for rank in told:
        (said,) = rank["rebuilt"]["said"]
        assert said.startswith("the engine was not rebuilt: DeepSpeed refuses it")


def test_compression_and_activation_checkpointing_go_along_to_the_new_engine(told):
    for rank in told:
        assert rank["rebuilt, with more"]["codec"]
        assert rank["rebuilt, with more"]["apart"] < 1e-3


def test_where_one_sample_does_not_fit_more_is_given_up_until_it_does(told):
    for rank in told:
        case = rank["starved"]
        assert case["stage"] == 3
        assert case["said"] == []
        assert case["each"] == [0, 0, 3, 0]
        assert case["apart"] <= 1e-6
        assert case["samples"] == ALL_SAMPLES
    assert told[0]["starved"]["replays"] == 3
    assert told[1]["starved"]["survived"] == 3


def test_samples_of_windows_that_were_run_again_or_dropped_are_counted_once(told):
    for rank in told:
        for case in ("starved", "starved for good"):
            assert rank[case]["samples told"] == ALL_SAMPLES / 2


def test_where_nothing_is_left_to_give_up_each_rank_says_why_and_may_go_on(told):
    first, second = (rank["starved for good"] for rank in told)

    assert first["said"][0].startswith("PeerOutOfMemory: out of memory on rank 1")
    assert second["said"][0].startswith("RuntimeError: DefaultCPUAllocator: can't allocate memory")
    for case in (first, second):
        assert case["apart"] <= 1e-6
        assert case["samples"] == ALL_SAMPLES
        assert case["plan"]["failures"] == [{"length": 6, "samples": 1}]
    assert first["gave up"] == 1


def test_a_rebuilt_run_is_saved_and_taken_up_by_a_run_of_the_first_configuration(told):
    for rank in told:
        assert rank["saved"]["stage"] == 3
        assert rank["saved"]["apart"] <= 1e-6
        assert rank["saved"]["client"] == {"note": "mine"}
        assert rank["saved"]["samples"] == ALL_SAMPLES
