"""The tuner's decision records, compared with the settings of the engines on two real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from scripts.separate_ranks import outputs, run_apart

pytestmark = pytest.mark.jobs

Results = dict[str, Any]

VERDICTS = ["accepted", "rolled_back", "accepted", "rejected", "interrupted", "not_undone"]
STAGES = [0, 0, 0, 0, 0, 1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    folder = tmp_path_factory.mktemp("decisions")
    ended = run_apart("tuner/decisions_job.py", folder, world_size=2)
    assert all(rank.report for rank in ended), outputs(ended)
    return [rank.report for rank in ended]


def test_each_kind_of_decision_was_made_with_deepspeeds_default_optimizer(ranks):
    assert [decision["verdict"] for decision in ranks[0]["decisions"]] == VERDICTS
    assert {each["optimizer"] for each in ranks[0]["read back"]} == {"FusedAdam"}
    assert not ranks[0]["ended"]["other failures"]


def test_after_each_decision_all_ranks_use_what_its_record_says(ranks):
    for rank in ranks:
        for decision, found in zip(ranks[0]["decisions"], rank["read back"], strict=True):
            recorded = {knob: decision["in_use"].get(knob) for knob in found["knobs"]}
            assert found["knobs"] == recorded, decision["verdict"]


def test_the_engine_itself_has_the_recorded_values(ranks):
    for rank in ranks:
        assert [each["stage"] for each in rank["read back"]] == STAGES
        assert [each["config"] for each in rank["read back"]] == STAGES
        assert [each["collects"] for each in rank["read back"]] == [True, True, *[False] * 4]


def test_a_change_that_could_not_be_undone_is_named(ranks):
    last = ranks[0]["decisions"][-1]

    assert "zero_stage=1" in last["reason"]
    assert "rank 1: the engine was not rebuilt: the test refuses it" in last["reason"]
