"""The demo on a GPU, as a user runs it: all figures, and no failed hook."""

from __future__ import annotations

import json
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

STEPS = 60
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")


def test_the_demo_has_all_figures_of_the_gpu(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    variables = {name: value for name, value in rank_variables().items() if name not in OF_A_RANK}

    done = subprocess.run(
        [sys.executable, "-m", "zerowatch", "demo", "--steps", str(STEPS), "--nproc", "1"],
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
    last = records[-1]
    record_property("seconds of a step", last["seconds"])
    record_property("phases", last["phase_seconds"])
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert len(records) >= STEPS
    assert last["loss"] is not None
    assert last["memory_bytes"]["cuda:0"]["allocated"] > 0
    assert any("cuda:0" in record["device_readings"] for record in records)
