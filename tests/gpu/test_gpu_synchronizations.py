"""How often a step waits for the GPU, with and without monitoring, and in a TrainingRun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu.rank_jobs import run_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (report,) = run_job("synchronizations_job.py", tmp_path_factory.mktemp("synchronizations"))
    return report


@pytest.mark.parametrize("stage", ["stage 1", "stage 3"])
def test_monitoring_adds_no_synchronization(
    found: dict[str, Any], stage: str, record_property: Callable[[str, object], None]
) -> None:
    plain, monitored = found["stages"][stage]["plain"], found["stages"][stage]["monitored"]

    record_property("plain", plain)
    record_property("monitored", monitored)
    assert found["stages"][stage]["own"] == []
    assert monitored["warned"] == plain["warned"]
    assert sum(monitored["waited"].values()) <= sum(plain["waited"].values())


def test_a_window_of_a_training_run_waits_once(
    found: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    record_property("places", sorted(set(found["training run"]["own"])))

    assert len(found["training run"]["own"]) <= found["windows"]
