"""torch.compile and CUDA graphs under monitoring."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu.rank_jobs import run_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="needs triton, which torch.compile uses"
    ),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (report,) = run_job("graphs_job.py", tmp_path_factory.mktemp("graphs"))
    return report


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_trains_as_without_monitoring(
    found: dict[str, Any], mode: str, record_property: Callable[[str, object], None]
) -> None:
    record_property("coverage", found[mode]["coverage"])

    assert found[mode]["bitwise"]
    assert found[mode]["steps"] == 12
    assert found[mode]["failures"] == {}


def test_graphs_are_captured_and_replayed_between_monitored_steps(found: dict[str, Any]) -> None:
    assert found["captured"] == {"equal": True, "failures": {}}
