"""Monitoring by a process of its own on GPUs: the same training, and less time of our threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.cost_figures import MAX_SHORT_STEP_RATIO, Record, record_times
from gpu.rank_jobs import FLIGHT_RECORDER, run_job
from scripts.launching import SCRIPTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SEPARATE = {"ZEROWATCH_PROCESS_SEPARATE": "true"}
CONFIGURATIONS = ("stage 2", "stage 3")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = str(SCRIPTS / "monitor" / "compare_monitored.py")
    folder, variables = tmp_path_factory.mktemp("compared"), FLIGHT_RECORDER | SEPARATE
    (found,) = run_job(script, folder, *CONFIGURATIONS, variables=variables)
    return dict(found)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_training_is_the_same_and_calls_are_those_of_the_flight_recorder(
    compared: dict[str, Any], name: str
) -> None:
    found = compared[name]
    assert "monitoring_process" in found["cost_parts"]
    assert found["trained"]
    assert found["bitwise_equal"]
    assert found["our_calls"] == found["flight_calls"]
    assert found["our_bytes"] == found["flight_bytes"]
    assert found["coverage"] == [1.0] * 20


def test_step_time_of_a_model_with_short_steps(tmp_path: Path, record_property: Record) -> None:
    (found,) = run_job("cost_job.py", tmp_path, "short", "2", variables=SEPARATE)

    step = record_times(found, record_property)
    assert found["failures"] == {}
    assert found["devices"] == ["cuda:0"]  # by NVML in the monitoring process
    assert step < MAX_SHORT_STEP_RATIO
