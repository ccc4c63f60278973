"""Rebuilds of a real engine on a GPU: its state, and the memory that is returned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu.rank_jobs import run_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("optimizer", ["AdamW", pytest.param("FusedAdam", id="fused")])
def test_rebuilds_through_all_stages_and_back_keep_the_state_and_return_the_memory(
    optimizer: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    (found,) = run_job("rebuild_chain_job.py", tmp_path, optimizer)

    record_property("difference to training without rebuilds", found["difference"])
    record_property("bytes", [found["allocated before"], found["allocated after"]])
    assert found["optimizer"] == optimizer
    assert [each["kept"] for each in found["rebuilds"]] == [True] * 5
    assert [each["stage"] for each in found["rebuilds"]] == [1, 2, 3, 2, 0]
    assert found["difference"] < 1e-5
    assert found["allocated after"] == pytest.approx(found["allocated before"], rel=0.05)
