"""Generation on a GPU, with a plain and a hybrid engine: unchanged, counted, in its phase."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu.rank_jobs import run_job
from scripts.launching import SCRIPTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="needs transformers"
    ),
]

ROUNDS = 20
RECORD = {"TORCH_FR_BUFFER_SIZE": "200000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "200000"}
each_stage = pytest.mark.parametrize("stage", ["stage 2", "stage 3"])


ENGINES = {"plain": "DeepSpeedEngine", "hybrid": "DeepSpeedHybridEngine"}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def found(engine: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script, folder = str(SCRIPTS / "monitor" / "generate_job.py"), tmp_path_factory.mktemp(engine)
    (report,) = run_job(script, folder, engine, "2", "3", variables=RECORD)
    return report


@each_stage
def test_weights_and_samples_are_bitwise_equal(
    engine: str, found: dict[str, Any], stage: str
) -> None:
    assert found[stage]["engine"] == ENGINES[engine]
    assert found[stage]["has_trained"]
    assert found[stage]["weights_are_equal"]
    assert found[stage]["samples_are_equal"]
    assert found[stage]["failures"] == {}
    assert found[stage]["is_restored"]


@each_stage
def test_generated_tokens_are_counted_exactly(found: dict[str, Any], stage: str) -> None:
    rounds = found[stage]["rounds"]
    generated = [record["generation"] for record in found[stage]["records"]]

    assert [each["calls"] for each in generated] == [1] * ROUNDS
    assert [each["tokens"] for each in generated] == [each["tokens"] for each in rounds]
    assert [each["sequences"] for each in generated] == [each["sequences"] for each in rounds]


@each_stage
def test_steps_add_up_to_what_the_script_measures_and_generation_to_what_it_waited_for(
    found: dict[str, Any], stage: str, record_property: Callable[[str, object], None]
) -> None:
    rounds, records = found[stage]["rounds"], found[stage]["records"]
    steps = sum(record["seconds"] for record in records[1:])
    lasted = (rounds[-1]["idle_ns"] - rounds[0]["idle_ns"]) / 1e9
    generated = sum(record["phase_seconds"]["generate"] for record in records[1:])
    waited = sum(each["outside_ns"] for each in rounds[1:]) / 1e9

    record_property("seconds of steps, ours and the script's", [steps, lasted])
    record_property("seconds of generation, ours and the script's", [generated, waited])
    assert len(records) == ROUNDS
    assert steps == pytest.approx(lasted, rel=0.01)
    assert generated == pytest.approx(waited, rel=0.05)


@each_stage
def test_gathers_of_parameters_are_those_of_the_flight_recorder(
    found: dict[str, Any], stage: str
) -> None:
    gathers = sum(each["generation"]["gathers"] for each in found[stage]["records"])

    assert gathers == found[stage]["gathers"]  # on a single rank DeepSpeed gathers nothing
