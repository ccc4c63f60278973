"""Times of collectives and exposed time on GPUs, compared with kineto's kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu.rank_jobs import run_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

Record = Callable[[str, object], None]
CASES = ("synchronous", "waited_for_halfway", "waited_for_when_done", "two_at_once")
TOLERANCE = 0.03  # of the time of the collectives


def test_times_of_calls_on_a_stream_of_their_own(tmp_path: Path, record_property: Record) -> None:
    (found,) = run_job("kineto_job.py", tmp_path)

    record_property("seconds", found)
    assert set(found) == set(CASES)
    for case, figures in found.items():
        tolerance = TOLERANCE * figures["kineto comm"]
        assert figures["calls"] == (10 if case == "two_at_once" else 5), case
        assert figures["comm"] == pytest.approx(figures["kineto comm"], abs=tolerance), case
        assert figures["exposed"] == pytest.approx(figures["kineto exposed"], abs=tolerance), case


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_times_of_nccls_kernels_on_several_gpus(tmp_path: Path, record_property: Record) -> None:
    ranks = run_job("kineto_job.py", tmp_path, world_size=2)

    for stage in ("stage 2", "stage 3"):
        ratios = [step["comm"] / step["kineto comm"] for step in ranks[0][stage]]
        record_property(f"{stage}: ours over kineto's", [round(ratio, 4) for ratio in ratios])
        exposed = [
            (step["exposed"] - step["kineto exposed"]) / step["kineto comm"]
            for step in ranks[0][stage]
        ]
        record_property(f"{stage}: exposed, ours less kineto's, over its time", exposed)
        assert statistics.median(ratios) == pytest.approx(1.0, abs=TOLERANCE), stage
        assert statistics.median(exposed) == pytest.approx(0.0, abs=TOLERANCE), stage
