"""torch.compile and CUDA graphs under monitoring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu.checks import missing_for_triton
from gpu.rank_jobs import run_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
MISSING = missing_for_triton()


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_trains_as_without_monitoring(
    mode: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    (found,) = run_job("graphs_job.py", tmp_path, mode)

    record_property("coverage", found[mode]["coverage"])
    assert found[mode]["bitwise"]
    assert found[mode]["steps"] == 12
    assert found[mode]["failures"] == {}


def test_graphs_are_captured_and_replayed_between_monitored_steps(tmp_path: Path) -> None:
    (found,) = run_job("graphs_job.py", tmp_path, "captured")

    assert found["captured"] == {"equal": True, "captures": 20, "failures": {}}
