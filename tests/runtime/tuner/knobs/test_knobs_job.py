"""Tests of every knob in a real run on two ranks: set, read back, restored.

Covers `knob.py` and `layout_knobs.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
from scripts.separate_ranks import outputs, run_apart

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

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
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    ranks = run_apart("tuner/tuner_knobs_job.py", tmp_path_factory.mktemp("knobs"), world_size=2)
    assert [rank.returncode for rank in ranks] == [0, 0], outputs(ranks)
    return [rank.report for rank in ranks]


@pytest.mark.parametrize("case", CASES)
def test_each_knob_of_a_stage_is_set_read_back_and_restored(results, case: str):
    for rank in results:
        turned = rank[case]["turned"]
        assert turned.keys() == KNOBS[case]
        for name, found in turned.items():
            assert found["result"]["done"], (name, found["result"])
            assert found["reads"] == found["value"], name
            assert found["back"]["done"], (name, found["back"])
            assert found["same"], name


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_bitwise_those_of_a_run_without_switches(results, case):
    assert [rank[case]["bitwise"] for rank in results] == [True, True]


@pytest.mark.parametrize("stage", STAGES)
def test_options_are_the_same_on_all_ranks_and_have_the_value_in_use(results, stage: str):
    first, second = (rank[stage]["options"] for rank in results)

    assert first == second
    assert first["micro_batch_samples"] == [1, 2, 4]
    assert first["zero_stage"] == [0, 1, 2, 3]


def test_a_stage_without_offload_is_no_option_while_offloading(results):
    assert results[0]["stage 2, offload"]["options"]["zero_stage"] == [1, 2, 3]


def test_a_rebuild_keeps_the_values_that_its_stage_supports(results):
    for rank in results:
        found = rank["over a rebuild"]
        at_3, at_0 = found["at 3"], found["at 0"]
        assert found["to 3"]["done"], found["to 3"]
        assert (at_3["reduce_bucket_size"], at_3["reduce_scatter"]) == (512, False)
        assert "use_multi_rank_bucket_allreduce" not in at_3
        assert (at_3["activation_checkpointing"], at_3["gradient_compression"]) == (True, "bf16")
        assert found["same compressor"]
        assert (at_0["reduce_bucket_size"], at_0["timers.throughput.synchronized"]) == (512, False)
        assert "reduce_scatter" not in at_0


def test_a_rollback_over_two_rebuilds_ends_at_the_first_configuration(results):
    for rank in results:
        found = rank["over a rebuild"]
        assert found["back"]["done"]
        assert found["same"]
        zero, first = (found[which]["zero_optimization"] for which in ("config", "config before"))
        assert zero.items() >= first.items()


def test_the_nominal_bucket_of_stage_0_is_not_kept_at_other_stages(results):
    for rank in results:
        found = rank["from stage 0"]
        assert found["result"]["done"], found["result"]
        assert (found["before"], found["after"]) == (500_000_000, 4096)


def test_an_alternating_trial_neither_enables_the_guard_nor_accumulates_patches(results):
    for rank in results:
        assert not any(rank["alternating"]["armed"])
        assert not rank["alternating"]["wrapped"]


@pytest.mark.parametrize("stage", [1, 2])
def test_what_excludes_asynchronous_reduction_is_refused_unless_it_is_switched_off(results, stage):
    for rank in results:
        found = rank[f"asynchronous, stage {stage}"]
        refused = {name for name, result in found["results"].items() if not result["done"]}
        assert refused == {
            *{"with reduce_scatter"},
            *({"with overlap_comm"} if stage == 2 else ()),
        }
        for name in refused:
            assert "asynchronous_reduction needs reduce_scatter" in found["results"][name]["reason"]
        assert found["same"] and found["bitwise"]


def test_a_stage_that_overlaps_is_refused_unless_asynchronous_reduction_is_switched_off(results):
    for rank in results:
        found = rank["to an overlapping stage"]
        refused = {name for name, result in found["results"].items() if not result["done"]}
        assert refused == {"with"}, found["results"]
        assert found["same"] and found["overlaps"] and found["on"]


def test_read_only_knobs_of_an_engine_have_the_same_values(results):
    for rank in results:
        for stage in STAGES:
            found = rank[stage]
            shared = found["read only"].keys() & found["values"].keys()
            assert shared >= KNOBS[stage] - {"gradient_compression", "asynchronous_reduction"}
            assert {name: found["read only"][name] for name in shared} == {
                name: found["values"][name] for name in shared
            }
