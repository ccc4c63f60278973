"""A tuned run's numbers compared with those of an untuned run."""

from __future__ import annotations

from typing import Any

import pytest
from scripts.separate_ranks import outputs, run_apart

pytestmark = pytest.mark.jobs

MOST_APART = 3.0  # times what a mere change of the bucket size gives
Results = dict[str, Any]


def results_of(ranks: int, numerics: str, folder: Any) -> list[Results]:
    ended = run_apart("tuner/tuned_checks.py", folder, world_size=ranks, arguments=(numerics,))
    assert all(rank.report for rank in ended), outputs(ended)
    return [rank.report for rank in ended]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    return results_of(2, "bitwise", tmp_path_factory.mktemp("bitwise"))


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """With two ranks every sum is the same in any order."""
    return results_of(3, "reassociation", tmp_path_factory.mktemp("reassociation"))


def test_under_bitwise_every_loss_and_weight_is_that_of_the_untuned_run(two_ranks):
    for rank in two_ranks:
        assert rank["saved"]["same"]


def test_under_bitwise_changes_were_tried_and_judged(two_ranks):
    tried = two_ranks[0]["saved"]

    assert len(tried["verdicts"]) >= 2
    assert {numerics for _, numerics in tried["turned"]} == {"bitwise"}
    assert tried["worked with"] == two_ranks[1]["saved"]["worked with"]
    assert len(tried["worked with"]) >= 2
    assert not tried["failures"]


def test_a_save_during_a_trial_has_the_known_good_configuration(two_ranks):
    saved = two_ranks[0]["saved"]

    assert saved["began"]
    assert saved["after save"]["values"] == saved["after save"]["good"]


def test_a_run_resumed_from_such_a_save_is_bitwise_equal(two_ranks):
    for rank in two_ranks:
        assert rank["saved"]["again"]["same"]
        assert rank["saved"]["again"]["steps"] > rank["saved"]["saved at"]


def test_a_run_without_a_tuner_has_no_decisions_and_no_states(two_ranks):
    off = two_ranks[0]["off"]

    assert not off["wrote decisions"]
    assert off["states"] == 0


def test_the_stop_file_rolls_back_the_trial_and_freezes(two_ranks):
    for rank in two_ranks:
        stopped = rank["stopped"]
        assert stopped["began"]
        assert stopped["frozen"]["values"] == stopped["still frozen"]["values"]
        assert stopped["same"]
    stopped = two_ranks[0]["stopped"]
    assert stopped["frozen"]["values"] == stopped["frozen"]["good"]
    assert stopped["frozen"]["state"] == stopped["still frozen"]["state"] == "frozen"
    assert stopped["frozen"]["decisions"] == stopped["still frozen"]["decisions"]


def test_without_the_stop_file_it_resumes(two_ranks):
    assert two_ranks[0]["stopped"]["began again"]


def test_without_the_watch_thread_nothing_is_decided_and_training_continues(two_ranks):
    for rank in two_ranks:
        assert rank["stopped"]["still blind"]["values"] == rank["stopped"]["blind"]["values"]
        assert rank["stopped"]["same"]
    stopped = two_ranks[0]["stopped"]
    assert stopped["still blind"]["decisions"] == stopped["blind"]["decisions"]
    assert stopped["still blind"]["state"] == "observe"


def test_incomplete_communication_figures_start_no_trial(two_ranks):
    failing = two_ranks[0]["failing"]

    assert failing["uncovered"]["decisions"] == 0
    assert failing["uncovered"]["state"] == "observe"
    assert failing["began"]


@pytest.mark.parametrize(("time", "then"), [(0, "after it"), (1, "after a call")])
def test_a_trial_is_rolled_back_after_a_window_that_ended_by_an_error(two_ranks, time, then):
    first, second = (rank["failing"] for rank in two_ranks)

    assert first["spoiled"][time] != first[then]["good"]
    assert first[then]["values"] == first[then]["good"]
    assert first[then]["values"] == second[then]["values"]
    assert first["reasons"].count("a window with it ended by an error") == 2
    assert first["same"] and second["same"]


def test_after_an_error_of_the_controller_all_ranks_roll_back(two_ranks):
    first, second = (rank["failing controller"] for rank in two_ranks)

    assert first["began"]
    assert first["on trial"] != first["failed"]["good"]
    assert first["failed"]["values"] == first["failed"]["good"]
    assert first["failed"]["values"] == second["failed"]["values"]
    assert (first["failures"], second["failures"]) == (1, 0)
    assert first["same"] and second["same"]


@pytest.mark.slow
def test_under_reassociation_a_tuned_run_is_as_close_as_another_bucket_size(three_ranks):
    first = three_ranks[0]

    assert "reassociation" in {numerics for _, numerics in first["tuned"]["turned"]}
    assert first["bucket apart"] > 0
    for rank in three_ranks:
        assert rank["tuned apart"] <= MOST_APART * first["bucket apart"]
