"""What monitoring costs on a GPU: a large model, and a small one whose steps are short."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu import probes
from gpu.cost_figures import MAX_SHORT_STEP_RATIO, Record, record_times
from gpu.rank_jobs import run_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

GIB = 2**30
NEEDED_BYTES = 39 * GIB
MAX_STEP_RATIO, MAX_ADDED_RESERVED_RATIO = 1.02, 0.02


@pytest.mark.parametrize(
    ("num_ranks", "stage"),
    [
        pytest.param(1, 2, id="one"),
        pytest.param(  # asynchronous gathers of parameters beside all else
            2,
            3,
            id="several",
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
        ),
    ],
)
def test_step_time_and_memory_of_a_large_model_stay_the_same(
    num_ranks: int, stage: int, tmp_path: Path, record_property: Record
) -> None:
    if torch.cuda.get_device_properties(0).total_memory < NEEDED_BYTES:
        pytest.skip(f"needs a GPU with {NEEDED_BYTES // GIB} GiB")

    found, *_ = run_job("cost_job.py", tmp_path, "large", str(stage), world_size=num_ranks)

    step = record_times(found, record_property)
    plain, monitored = (
        [each["reserved"] for each in found[name]] for name in ("plain", "monitored")
    )
    reserved = probes.added_ratio(plain[:-1], monitored)
    exact = {interval: each["reserved"] for interval, each in found["exact"].items()}
    record_property("added peak reserved memory", reserved)
    record_property("peak reserved by exact_collectives_steps", exact)
    retries = {
        name: sum(each["retries"] for each in found[name]) for name in ("plain", "monitored")
    }
    record_property("retries", retries)
    assert found["parameters"] > 1e9
    assert found["failures"] == {}
    assert step < MAX_STEP_RATIO
    assert reserved < MAX_ADDED_RESERVED_RATIO
    without_exact_ends = [exact["0"] for _ in plain]
    assert probes.added_ratio(plain, without_exact_ends) < MAX_ADDED_RESERVED_RATIO
    assert retries["monitored"] <= retries["plain"]


def test_step_time_of_a_model_with_short_steps(tmp_path: Path, record_property: Record) -> None:
    (found,) = run_job("cost_job.py", tmp_path, "short", "2")

    step = record_times(found, record_property)
    assert found["failures"] == {}
    assert step < MAX_SHORT_STEP_RATIO
