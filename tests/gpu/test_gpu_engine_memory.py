"""Held bytes and peaks of a real engine on a GPU, compared with torch's allocator."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu.rank_jobs import rank_variables
from scripts.launching import SCRIPTS

from zerowatch.runtime.devices.cuda_allocator import device_memory
from zerowatch.runtime.devices.shared_peak_counters import SharedPeakCounters

MIB = 2**20
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def block(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8, device="cuda")


def test_each_reading_has_the_peak_since_the_last_and_torch_still_reports_its_own() -> None:
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats(0)
    floor = torch.cuda.memory_allocated(0)
    probe = device_memory(0, reset_peak=True)
    try:
        probe.read()
        del_me = block(256 * MIB)
        del del_me
        first, second = probe.read(), probe.read()

        assert first["peak_allocated"] == floor + 256 * MIB
        assert second["peak_allocated"] == floor
        assert torch.cuda.max_memory_allocated(0) == floor + 256 * MIB
        assert torch.accelerator.max_memory_allocated(0) == floor + 256 * MIB
        torch.cuda.reset_peak_memory_stats(0)
        assert torch.cuda.max_memory_allocated(0) == floor
    finally:
        probe.close()


def test_other_statistics_are_unchanged() -> None:
    held = block(64 * MIB)
    before = torch.cuda.memory_stats_as_nested_dict(0)
    peaks = SharedPeakCounters(torch._C)
    try:
        peaks.drain(0)

        assert torch.cuda.memory_stats_as_nested_dict(0) == before
    finally:
        peaks.restore()
    assert held.numel() == 64 * MIB


def test_blocks_too_small_for_large_requests_are_unusable() -> None:
    torch.cuda.empty_cache()
    probe = device_memory(0, reset_peak=False)
    blocks = [block(4 * MIB) for _ in range(64)]
    before = probe.read()["unusable"]

    del blocks[::2]
    after = probe.read()["unusable"]

    assert after - before >= 100 * MIB


CASES = (
    "fp32 stage 0",
    "bf16 stage 1",
    "fp32 stage 2",
    "bf16 stage 3",
    "bf16 stage 2, optimizer on cpu",
    "bf16 stage 3, all on cpu",
)


@pytest.mark.parametrize("name", CASES)
def test_after_a_step_the_held_bytes_equal_the_allocator_s(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    report = tmp_path / "report.json"
    # cuBLAS's workspaces come from the allocator too, and belong to no tensor.
    no_workspace = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}

    subprocess.run(
        [sys.executable, str(SCRIPTS / "memory" / "engine_memory_cuda_job.py"), str(report), name],
        env={**rank_variables(), **no_workspace},
        check=True,
        timeout=300,
    )

    samples = json.loads(report.read_text())
    record_property("bytes", samples)
    for sample in samples:
        # Without what the allocator adds to a block: up to 1 MiB, as it splits off no less.
        assert sample["measured"] == pytest.approx(sample["requested"], rel=0.001)
