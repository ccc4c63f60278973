"""Live settings, activation checkpointing and optimizer offload on a GPU, applied and undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.rank_jobs import run_job
from scripts.engine.live_settings_cases import CASES
from scripts.launching import SCRIPTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SETTINGS = [case.name for case in CASES]
SAVINGS = (
    *(f"checkpointing, stage {stage}" for stage in range(4)),
    *(f"offload, stage {stage}" for stage in range(4)),
    "offload, BF16_Optimizer",
    "every saving, stage 3",
)


def report(folder: Path, script: str, names: list[str]) -> dict[str, Any]:
    (found,) = run_job(str(SCRIPTS / "engine" / script), folder, *names)
    return found


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return report(tmp_path_factory.mktemp("settings"), "live_settings_job.py", SETTINGS)


@pytest.fixture(scope="module")
def savings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return report(tmp_path_factory.mktemp("savings"), "memory_savings_job.py", list(SAVINGS))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_applied_and_undone_and_training_is_the_same(
    settings: dict[str, Any], name: str
) -> None:
    found = settings[name]

    assert found["holds_after_apply"]
    assert found["holds_after_undo"]
    assert found["bitwise"], found["difference"]


@pytest.mark.parametrize("name", SAVINGS)
def test_a_memory_saving_is_applied_and_undone_and_training_is_the_same(
    savings: dict[str, Any], name: str
) -> None:
    found = savings[name]
    applied, undone = (slice(*found["spans"][span]) for span in ("applied", "undone"))

    assert found["forwards_restored"]
    assert found["step_restored"]
    assert found["bitwise"], found["difference"]
    if name.startswith("offload"):
        assert found["unsupported_reason"] is None
        assert all(found["num_offloaded"][applied])
        assert not any(found["num_offloaded"][undone])
    if name.startswith("checkpointing"):
        assert max(found["saved"][applied]) < min(found["saved"][undone])
