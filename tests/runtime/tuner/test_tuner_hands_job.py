"""Every knob of a real run on two ranks: turned, read back, turned back."""

from __future__ import annotations

from typing import Any

import pytest
from scripts.separate_ranks import run_apart

pytestmark = pytest.mark.jobs

STAGES = [f"stage {stage}" for stage in range(4)]
CASES = [*STAGES, "stage 2, offload"]
EVERYWHERE = {
    "reduce_bucket_size",
    "timers.throughput.synchronized",
    "activation_checkpointing",
    "micro_batch_samples",
    "python_gc",
    "gradient_compression",
    "zero_stage",
}
FROM_1 = {"reduce_scatter", "use_multi_rank_bucket_allreduce", "asynchronous_reduction"}
KNOBS = {
    "stage 0": EVERYWHERE,
    "stage 1": EVERYWHERE | FROM_1,
    "stage 2": EVERYWHERE | FROM_1 | {"overlap_comm"},
    "stage 3": EVERYWHERE
    | {"reduce_scatter", "prefetch_bucket_size", "max_live_parameters", "max_reuse_distance"}
    | {"param_persistence_threshold"},
    "stage 2, offload": {"offload_optimizer"},
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    ranks = run_apart("tuner_hands_job.py", tmp_path_factory.mktemp("hands"), world_size=2)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].last_words
    return [rank.told for rank in ranks]


@pytest.mark.parametrize("case", CASES)
def test_each_knob_of_a_stage_is_turned_reads_back_and_is_turned_back(told, case: str):
    for rank in told:
        turned = rank[case]["turned"]
        assert turned.keys() == KNOBS[case]
        for name, found in turned.items():
            assert found["outcome"]["done"], (name, found["outcome"])
            assert found["reads"] == found["value"], name
            assert found["back"]["done"], (name, found["back"])
            assert found["same"], name


@pytest.mark.parametrize("case", CASES)
def test_after_all_that_the_weights_are_bitwise_those_of_a_run_that_nobody_touched(told, case):
    assert [rank[case]["bitwise"] for rank in told] == [True, True]


@pytest.mark.parametrize("stage", STAGES)
def test_options_are_the_same_on_all_ranks_and_hold_the_value_of_now(told, stage: str):
    first, second = (rank[stage]["options"] for rank in told)

    assert first == second
    assert first["micro_batch_samples"] == [1, 2, 4]
    assert first["zero_stage"] == [0, 1, 2, 3]


def test_a_stage_that_offloading_cannot_have_is_no_option(told):
    assert told[0]["stage 2, offload"]["options"]["zero_stage"] == [1, 2, 3]


def test_another_stage_takes_along_what_was_turned_and_drops_what_it_does_not_have(told):
    for rank in told:
        found = rank["over a rebuild"]
        at_3, at_0 = found["at 3"], found["at 0"]
        assert found["to 3"]["done"], found["to 3"]
        assert (at_3["reduce_bucket_size"], at_3["reduce_scatter"]) == (512, False)
        assert "use_multi_rank_bucket_allreduce" not in at_3
        assert (at_3["activation_checkpointing"], at_3["gradient_compression"]) == (True, "bf16")
        assert found["same codec"]
        assert (at_0["reduce_bucket_size"], at_0["timers.throughput.synchronized"]) == (512, False)
        assert "reduce_scatter" not in at_0


def test_the_way_back_over_two_rebuilds_ends_at_the_first_configuration(told):
    for rank in told:
        found = rank["over a rebuild"]
        assert found["back"]["done"]
        assert found["same"]
        zero, first = (found[which]["zero_optimization"] for which in ("config", "config before"))
        assert zero.items() >= first.items()


def test_a_bucket_that_stage_0_only_works_as_if_it_had_is_not_taken_along(told):
    for rank in told:
        found = rank["from stage 0"]
        assert found["outcome"]["done"], found["outcome"]
        assert (found["before"], found["after"]) == (500_000_000, 4096)


def test_a_trial_that_goes_to_and_fro_neither_arms_the_guard_nor_piles_up_wraps(told):
    for rank in told:
        assert not any(rank["to and fro"]["armed"])
        assert not rank["to and fro"]["wrapped"]


def test_hands_of_a_bare_engine_read_the_same(told):
    for rank in told:
        for stage in STAGES:
            found = rank[stage]
            shared = found["read only"].keys() & found["values"].keys()
            assert shared >= KNOBS[stage] - {"gradient_compression", "asynchronous_reduction"}
            assert {name: found["read only"][name] for name in shared} == {
                name: found["values"][name] for name in shared
            }
