"""What monitoring costs a model with 1.2 billion parameters on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu import probes
from gpu.rank_jobs import run_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

GIB = 2**30
NEEDED_BYTES = 39 * GIB
MAX_STEP_RATIO, MAX_RESERVED_RATIO = 0.02, 0.02


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
    num_ranks: int,
    stage: int,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    if torch.cuda.get_device_properties(0).total_memory < NEEDED_BYTES:
        pytest.skip(f"needs a GPU with {NEEDED_BYTES // GIB} GiB")

    found, *_ = run_job("cost_job.py", tmp_path, "large", str(stage), world_size=num_ranks)

    blocks = {
        name: {key: [one[key] for one in found[name]] for key in found[name][0]}
        for name in ("plain", "monitored")
    }
    step = probes.added_ratio(blocks["plain"]["seconds"], blocks["monitored"]["seconds"])
    reserved = probes.added_ratio(blocks["plain"]["reserved"], blocks["monitored"]["reserved"])
    record_property("parameters", found["parameters"])
    record_property("step seconds", {name: each["seconds"] for name, each in blocks.items()})
    record_property("added step time", step)
    record_property("added peak reserved memory", reserved)
    exact = {interval: each["reserved"] for interval, each in found["exact"].items()}
    record_property("peak reserved by exact_collectives_steps", exact)
    record_property("retries", {name: sum(each["retries"]) for name, each in blocks.items()})
    assert found["parameters"] > 1e9
    assert found["failures"] == {}
    assert step < MAX_STEP_RATIO
    assert reserved < MAX_RESERVED_RATIO
    without_exact_ends = [exact["0"] for _ in blocks["plain"]["reserved"]]
    added = probes.added_ratio(blocks["plain"]["reserved"], without_exact_ends)
    assert added < MAX_RESERVED_RATIO
    assert sum(blocks["monitored"]["retries"]) <= sum(blocks["plain"]["retries"])
