"""Measures the time that zerowatch adds to one collective, around fakes that do nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from bench.bench_options import Options
from bench.rank_processes import run_ranks
from bench.result_table import Row

GOALS = {("cpu", "gloo"): 3.0, ("cuda", "nccl"): 15.0}  # microseconds a call
CHECK_GOAL = 0.5  # the same, of a TrainingRun's check of its records


def bench(options: Options) -> Iterator[Row]:
    """Yield the added microseconds of recording, and of checks; on CUDA where there is a GPU."""
    for (device, backend), goal in GOALS.items():
        if device == "cuda" and not torch.cuda.is_available():
            yield Row(what="recording on cuda", measured="not measured: no GPU here")
            continue
        asked = {"device": device, "backend": backend, "repeats": 40 if options.quick else 400}
        found = run_ranks(
            "monitoring_cost/hot_path_job.py", asked, world_size=1, timeout_seconds=600
        )[0]
        for operation, added in found.items():
            yield _row(f"recording on {device}, {operation}", added, goal)
    asked = {"repeats": 40 if options.quick else 400}
    (found,) = run_ranks(
        "monitoring_cost/record_check_job.py", asked, world_size=1, timeout_seconds=600
    )
    for operation, added in found.items():
        yield _row(f"check of a TrainingRun's records, {operation}", added, CHECK_GOAL)


def _row(what: str, added: Sequence[float], goal: float) -> Row:
    median = added[len(added) // 2]
    low, high = added[len(added) // 20], added[-len(added) // 20]
    return Row(
        what=what,
        measured=f"{median:.2f} us a call",
        spread=f"{low:.2f} .. {high:.2f} (5th to 95th percentile)",
        goal=f"<= {goal:g} us",
        met=median <= goal,
    )
