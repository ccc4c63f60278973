"""Pipeline, tensor, expert and sequence parallel runs on two ranks, as monitoring records them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from chosen_cases import chosen, tiers
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

pytestmark = pytest.mark.jobs

Seen = dict[str, Any]
SAMPLES_EACH, TOKENS_EACH = 2, 12  # of a micro-batch
# Operation, group and phase of every call after the watch began.
ROLES = {
    "one_stage_on_two_ranks": {("all_reduce", "dp", "optimizer"), ("all_reduce", "dp", "other")},
    "experts_apart": {("all_to_all", "ep", "forward"), ("all_to_all", "ep", "backward")},
    "experts_on_every_rank": {("all_reduce", "dp", "backward")},
    "sequence_by_state": {
        ("all_to_all", "sp", "forward"),
        ("all_to_all", "sp", "backward"),
        ("all_reduce", "dp", "backward"),
    },
    "sequence_by_mesh": {("all_to_all", "sp", "forward"), ("all_to_all", "sp", "backward")},
    "tensor_parallel": {
        ("all_reduce", "tp", "forward"),
        ("all_reduce", "tp", "backward"),
        ("all_reduce", "dp", "backward"),
    },
}
PIPELINES = (
    "pipeline",
    "pipeline_with_evaluation",
    "pipeline_whose_first_stage_is_slow",
)
QUICK = ("pipeline", "experts_apart", "sequence_by_state")
OF_EVERY_SCHEDULE = {"forward", "backward", "optimizer", "other"}


@pytest.fixture(scope="module")
def ranks(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, Seen]]:
    folder = tmp_path_factory.mktemp("parallel")
    script, names = SCRIPTS / "collectives" / "parallel_checks.py", chosen(request, "name")

    finished = start_ranks(2, script, folder, *PIPELINES, *names, cwd=folder)

    assert finished.returncode == 0, finished.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def each_of(*names: str) -> pytest.MarkDecorator:
    quick = [name for name in names if name in QUICK]
    return pytest.mark.parametrize("name", tiers(names, quick))


def calls_of(seen: Seen) -> dict[tuple[str, str, str], int]:
    return {(op, group, phase): count for op, group, phase, count in seen["calls"]}


@each_of("pipeline", "tensor_parallel")
def test_weights_are_bitwise_equal_with_and_without_a_watch(ranks, name):
    for rank in ranks:
        assert rank[name]["trained"]
        assert rank[name]["bitwise_equal"]


@each_of("pipeline", "pipeline_there_and_back", *ROLES)
def test_every_call_is_covered_and_no_hook_fails(ranks, name):
    for rank in ranks:
        assert set(rank[name]["coverage"]) == {1.0}
        assert rank[name]["failures"] == []


@each_of(*ROLES)
def test_calls_have_the_role_of_their_group(ranks, name):
    for rank in ranks:
        assert ROLES[name] <= set(calls_of(rank[name]))
        assert not any(group == "other" for _, group, _ in calls_of(rank[name]))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_pipelines_calls_belong_to_the_pass_they_serve(ranks, stage):
    activations, gradients = ("send", "recv") if stage == 0 else ("recv", "send")

    assert calls_of(ranks[stage]["pipeline"]) == {
        (activations, "pp", "forward"): 4 * 3 + 1,  # and once the tensors' shapes
        (gradients, "pp", "backward"): 4 * 3,
        ("all_reduce", "pp", "optimizer"): 4 * 2,  # of tied weights, and the gradients' norm
        ("all_reduce", "dp", "optimizer"): 4 * 2,
        ("broadcast", "pp", "other"): 4,  # of the loss
    }


def test_a_pipelines_messages_are_timed_and_measured(ranks):
    activation_bytes = 3 * TOKENS_EACH * 16 * 4

    for rank in ranks:
        for step in rank["pipeline"]["steps"][1:]:
            for op in ("send", "recv"):
                totals = step["collectives"][op]
                assert (totals["calls"], totals["payload_bytes"]) == (3, activation_bytes)
                assert 0 < totals["seconds"] <= step["comm_exposed_seconds"] + 1e-9


def test_a_pipelines_window_is_known_on_each_stage(ranks):
    for stage, rank in enumerate(ranks):
        tokens = 3 * TOKENS_EACH if stage == 0 else None
        for step in rank["pipeline"]["steps"]:
            assert (step["micro_batches"], step["samples"]) == (3, 3 * SAMPLES_EACH)
            assert step["tokens"] == tokens


@each_of("pipeline", "pipeline_there_and_back", "one_stage_on_two_ranks")
def test_a_pipelines_loss_is_what_train_batch_returns(ranks, name):
    for rank in ranks:
        assert [step["loss"] for step in rank[name]["steps"]] == rank[name]["result"]


def test_a_pipelines_phases_add_up(ranks):
    for rank in ranks:
        for step in rank["pipeline"]["steps"]:
            phases = step["phase_seconds"]
            assert set(phases) == {*OF_EVERY_SCHEDULE, "data"}
            assert math.isclose(sum(phases.values()), step["seconds"])
            assert all(seconds > 0 for seconds in phases.values())


def test_an_evaluation_of_a_pipeline_is_a_phase_of_its_own(ranks):
    for rank in ranks:
        first, second = rank["pipeline_with_evaluation"]["steps"]
        assert "eval" not in first["phase_seconds"]
        assert second["phase_seconds"]["eval"] > 0
        assert (second["micro_batches"], second["samples"]) == (3, 3 * SAMPLES_EACH)
        in_eval = {
            op for op, _, phase in calls_of(rank["pipeline_with_evaluation"]) if phase == "eval"
        }
        assert in_eval & {"send", "recv"}


def test_a_pipeline_engine_is_restored(ranks):
    for rank in ranks:
        assert rank["pipeline_with_evaluation"]["wrapped"]
        assert rank["pipeline_with_evaluation"]["left"] == []


def test_a_slow_first_stage_is_time_that_the_second_spends_in_recv(ranks):
    slow, waiting = (rank["pipeline_whose_first_stage_is_slow"] for rank in ranks)

    assert waiting["recv"] == pytest.approx(0.1, rel=0.1)
    assert slow["forward"] == pytest.approx(0.1, rel=0.1)
    assert slow["exposed"] < 0.05 < waiting["exposed"]


@each_of("pipeline_there_and_back")
def test_micro_batches_that_pass_a_rank_twice_count_once(ranks, name):
    for stage, rank in enumerate(ranks):
        for step in rank[name]["steps"]:
            assert (step["micro_batches"], step["samples"]) == (4, 4 * SAMPLES_EACH)
            assert step["tokens"] == (4 * TOKENS_EACH if stage == 0 else None)
            assert set(step["phase_seconds"]) >= OF_EVERY_SCHEDULE


@each_of("estimated_pipeline")
def test_a_pipeline_in_bf16_is_estimated_with_its_partitioned_optimizer(ranks, name):
    for rank in ranks:
        seen = rank[name]
        assert seen["stages"] == [0, 1]
        assert seen["estimated"] == pytest.approx(seen["held"], rel=0.01)
        assert seen["resting"] == pytest.approx(seen["held_in_all"], rel=0.01)


@each_of("tensor_parallel")
def test_tensor_parallel_ranks_each_count_their_steps(ranks, name):
    for rank in ranks:
        steps = rank[name]["steps"]
        assert [step["step"] for step in steps] == [1, 2, 3, 4]
        for step in steps:
            assert set(step["phase_seconds"]) == OF_EVERY_SCHEDULE
            assert (step["micro_batches"], step["samples"]) == (2, 2 * SAMPLES_EACH)
            assert step["tokens"] == 2 * TOKENS_EACH
            assert step["comm_exposed_seconds"] > 0


@each_of("pipeline_there_and_back")
def test_messages_sent_in_batches_are_timed_to_the_end_of_their_wait(ranks, name):
    for rank in ranks:
        for step in rank[name]["steps"]:
            assert step["collectives"]["recv"]["seconds"] > 0
            assert step["comm_exposed_seconds"] <= step["comm_seconds"] + 1e-9
