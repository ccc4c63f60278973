"""The tuner keeps its word: a tuned run's numbers are those of a run that nobody tuned."""

from __future__ import annotations

from typing import Any

import pytest
from scripts.separate_ranks import run_apart

pytestmark = pytest.mark.jobs

MOST_APART = 3.0  # times what a mere change of the bucket size gives
Told = dict[str, Any]


def told_by(ranks: int, numerics: str, folder: Any) -> list[Told]:
    ended = run_apart("tuned_checks.py", folder, world_size=ranks, arguments=(numerics,))
    assert all(rank.told for rank in ended), ended[0].last_words
    return [rank.told for rank in ended]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    return told_by(2, "bitwise", tmp_path_factory.mktemp("bitwise"))


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    """Of two ranks every sum is the same in any order."""
    return told_by(3, "reassociation", tmp_path_factory.mktemp("reassociation"))


def test_under_bitwise_every_loss_and_weight_is_that_of_the_untuned_run(two_ranks):
    for rank in two_ranks:
        assert rank["saved"]["same"]


def test_under_bitwise_changes_were_really_made_and_judged(two_ranks):
    tried = two_ranks[0]["saved"]

    assert len(tried["verdicts"]) >= 2
    assert {numerics for _, numerics in tried["turned"]} == {"bitwise"}
    assert tried["worked with"] == two_ranks[1]["saved"]["worked with"]
    assert len(tried["worked with"]) >= 2
    assert not tried["failures"]


def test_a_save_in_the_middle_of_a_trial_holds_what_is_known_to_be_good(two_ranks):
    saved = two_ranks[0]["saved"]

    assert saved["began"]
    assert saved["after save"]["values"] == saved["after save"]["good"]


def test_a_run_that_takes_such_a_save_up_goes_on_with_the_same_bits(two_ranks):
    for rank in two_ranks:
        assert rank["saved"]["again"]["same"]
        assert rank["saved"]["again"]["steps"] > rank["saved"]["saved at"]


def test_a_run_without_a_tuner_decides_nothing_and_tells_nothing_of_one(two_ranks):
    off = two_ranks[0]["off"]

    assert not off["wrote decisions"]
    assert off["states"] == 0


def test_the_stop_file_takes_back_what_is_on_trial_and_freezes(two_ranks):
    for rank in two_ranks:
        stopped = rank["stopped"]
        assert stopped["began"]
        assert stopped["frozen"]["values"] == stopped["still frozen"]["values"]
        assert stopped["same"]
    stopped = two_ranks[0]["stopped"]
    assert stopped["frozen"]["values"] == stopped["frozen"]["good"]
    assert stopped["frozen"]["state"] == stopped["still frozen"]["state"] == "frozen"
    assert stopped["frozen"]["decisions"] == stopped["still frozen"]["decisions"]


def test_without_the_stop_file_it_goes_on(two_ranks):
    assert two_ranks[0]["stopped"]["began again"]


def test_where_the_watch_thread_dies_nothing_is_decided_and_training_goes_on(two_ranks):
    for rank in two_ranks:
        assert rank["stopped"]["still blind"]["values"] == rank["stopped"]["blind"]["values"]
        assert rank["stopped"]["same"]
    stopped = two_ranks[0]["stopped"]
    assert stopped["still blind"]["decisions"] == stopped["blind"]["decisions"]
    assert stopped["still blind"]["state"] == "observe"


def test_what_is_known_of_communication_by_half_is_no_reason_to_change_it(two_ranks):
    failing = two_ranks[0]["failing"]

    assert failing["uncovered"]["decisions"] == 0
    assert failing["uncovered"]["state"] == "observe"
    assert failing["began"]


@pytest.mark.parametrize(("time", "then"), [(0, "after it"), (1, "after a call")])
def test_what_was_on_trial_in_a_window_that_ended_by_an_error_is_taken_back(two_ranks, time, then):
    first, second = (rank["failing"] for rank in two_ranks)

    assert first["spoiled"][time] != first[then]["good"]
    assert first[then]["values"] == first[then]["good"]
    assert first[then]["values"] == second[then]["values"]
    assert first["reasons"].count("a window with it ended by an error") == 2
    assert first["same"] and second["same"]


def test_a_controller_that_fails_in_a_trial_leaves_all_on_what_was_good(two_ranks):
    first, second = (rank["failing"] for rank in two_ranks)

    assert first["on trial"] != first["failed"]["good"]
    assert first["failed"]["values"] == first["failed"]["good"]
    assert first["failed"]["values"] == second["failed"]["values"]
    assert (first["failures"], second["failures"]) == (1, 0)
    assert first["same"] and second["same"]


def test_under_reassociation_a_tuned_run_is_as_near_as_one_with_another_bucket_size(three_ranks):
    first = three_ranks[0]

    assert "reassociation" in {numerics for _, numerics in first["tuned"]["turned"]}
    assert first["bucket apart"] > 0
    for rank in three_ranks:
        assert rank["tuned apart"] <= MOST_APART * first["bucket apart"]
