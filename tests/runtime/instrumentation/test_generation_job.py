"""Generation with DeepSpeed's hybrid engine: training is unchanged, and the figures are exact.

The script generates with a small Qwen2 and trains on the result, on two ranks at ZeRO 2 and 3. It
counts the tokens itself, and PyTorch's Flight Recorder the gathers.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

STAGES = ("2", "3")
ROUNDS = 20
each_stage = pytest.mark.parametrize("stage", [f"stage {stage}" for stage in STAGES])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("generated")
    script = SCRIPTS / "monitor" / "generate_job.py"
    variables = {"TORCH_FR_BUFFER_SIZE": "200000"}

    finished = start_ranks(2, script, folder, "hybrid", *STAGES, cwd=folder, variables=variables)

    assert finished.returncode == 0, finished.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


@each_stage
def test_weights_and_samples_are_bitwise_equal_with_and_without_a_watch(ranks, stage) -> None:
    for rank in ranks:
        found = rank[stage]
        assert found["engine"] == "DeepSpeedHybridEngine"
        assert found["has_trained"]
        assert found["weights_are_equal"]
        assert found["samples_are_equal"]
        assert found["failures"] == {}
        assert found["is_restored"]


@each_stage
def test_generated_tokens_are_counted_exactly(ranks, stage) -> None:
    for rank in ranks:
        found = rank[stage]
        rounds = found["rounds"]
        generated = [record["generation"] for record in found["records"]]
        assert len(generated) == ROUNDS
        assert [each["calls"] for each in generated] == [1] * ROUNDS
        assert [each["tokens"] for each in generated] == [each["tokens"] for each in rounds]
        assert [each["sequences"] for each in generated] == [each["sequences"] for each in rounds]
        assert len({each["tokens"] for each in rounds}) > 1  # sequences end at different lengths

        metrics = found["metrics"]
        assert found["at_start"] == [0, 0, 0, 0]
        assert metrics["zerowatch_generate_calls_total"] == ROUNDS
        assert metrics["zerowatch_generated_tokens_total"] == sum(e["tokens"] for e in rounds)
        assert metrics["zerowatch_generated_sequences_total"] == sum(e["sequences"] for e in rounds)


@each_stage
def test_phases_add_up_to_wall_time(ranks, stage) -> None:
    for rank in ranks:
        rounds, records = rank[stage]["rounds"], rank[stage]["records"]
        for (before, after), record in zip(pairwise(rounds), records[1:], strict=True):
            # A step ends within the call of `engine.step`.
            least = (after["step_ns"][0] - before["step_ns"][1]) / 1e9
            most = (after["step_ns"][1] - before["step_ns"][0]) / 1e9
            assert least <= sum(record["phase_seconds"].values()) <= most
        for found, record in zip(rounds, records, strict=True):
            seconds = record["phase_seconds"]["generate"]
            assert found["inside_ns"] / 1e9 <= seconds <= found["outside_ns"] / 1e9
            assert record["generation"]["seconds"] == seconds


def test_gathers_of_parameters_are_those_of_the_flight_recorder(ranks) -> None:
    for rank in ranks:
        of_stage_2 = [each["generation"] for each in rank["stage 2"]["records"]]
        assert [each["collectives"] for each in of_stage_2] == [0] * ROUNDS
        found = rank["stage 3"]
        gathers = sum(each["generation"]["gathers"] for each in found["records"])
        assert gathers == found["gathers"] > 0
        assert all(each["generation"]["gathered_bytes"] > 0 for each in found["records"])
        assert found["metrics"]["zerowatch_generate_comm_exposed_seconds_total"] > 0


@each_stage
def test_memory_of_generation_is_apart_from_training(ranks, stage) -> None:
    for rank in ranks:
        records = rank[stage]["records"]
        has_peaks = any("peak_allocated" in each["memory_bytes"].get("cpu", {}) for each in records)
        peaks = [each["generation"]["peak_bytes"].get("cpu") for each in records]
        assert any(peaks) == has_peaks


def test_a_training_run_says_what_it_leaves_alone(ranks) -> None:
    for rank in ranks:
        found = rank["training run"]
        assert any("leaves generation alone" in message for message in found["messages"])
        assert "hybrid_engine" in found["refusal"]
        assert found["steps"] == 2
        assert found["tokens"][0] == found["tokens"][1]
