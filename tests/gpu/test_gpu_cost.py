"""What monitoring costs on a GPU: a large model, and a small one whose steps are short."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.confidence_intervals import ratio_interval
from gpu import probes
from gpu.rank_jobs import run_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

GIB = 2**30
NEEDED_BYTES = 39 * GIB
MAX_STEP_RATIO, MAX_ADDED_RESERVED_RATIO = 1.02, 0.02
# Steps of some ten milliseconds wait for Python. Above this ratio something has gone wrong.
MAX_SHORT_STEP_RATIO = 1.05

Record = Callable[[str, object], None]


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


def record_times(found: Mapping[str, Any], record_property: Record) -> float:
    """Record what is known of step times and our CPU time; return monitored over unmonitored."""
    plain = [each["seconds"] for each in found["plain"]]
    monitored = [each["seconds"] for each in found["monitored"]]
    step = ratio_interval(probes.ratios_to_neighbours(plain, monitored, plain[1:]))
    floor = ratio_interval(probes.ratios_to_neighbours(plain, plain[1:], plain[2:]))
    record_property("parameters", found["parameters"])
    record_property("step seconds", {"plain": plain, "monitored": monitored})
    record_property("monitored / plain", [step.estimate, step.low, step.high])
    record_property("plain / plain", [floor.estimate, floor.low, floor.high])
    for part in ("threads", "hooks"):
        # Our own clock is read once a second, so only the mean of all blocks says something.
        used = statistics.fmean(each[f"{part} ms/s"] for each in found["monitored"])
        record_property(f"{part} ms/s", used)
    return step.estimate
