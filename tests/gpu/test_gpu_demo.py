"""The demo on a GPU, as a user runs it: all figures, and no failed hook."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu.rank_jobs import rank_variables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

# The program `zerowatch`, also where it is not installed.
PROGRAM = "from zerowatch.__main__ import main; main()"
STEPS = 300  # long enough for several readings of the device
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")


def test_the_demo_has_all_figures_of_the_gpu(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    variables = {name: value for name, value in rank_variables().items() if name not in OF_A_RANK}

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "demo", "--steps", str(STEPS), "--nproc", "1"],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    assert "hook '" not in done.stderr, done.stderr[-4000:]
    (log,) = tmp_path.glob("runs/*/rank-0.jsonl")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [record["loss"] for record in records]
    memory, readings = (
        [record[name]["cuda:0"] for record in records if "cuda:0" in record[name]]
        for name in ("memory_bytes", "device_readings")
    )
    record_property("steps", len(records))
    record_property("seconds of a step", statistics.median(record["seconds"] for record in records))
    record_property("phases of the last step", records[-1]["phase_seconds"])
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert len(records) >= STEPS
    assert losses.count(None) < 0.05 * len(losses)
    assert all(each["allocated"] > 0 for each in memory)
    assert memory
    assert any("utilization_ratio" in each for each in readings)
