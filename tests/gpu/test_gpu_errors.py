"""Errors of a real GPU: a device-side assert, and memory that a reading must not take."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.rank_jobs import rank_variables
from scripts.launching import SCRIPTS, start

from zerowatch.runtime.common import accelerator
from zerowatch.runtime.common.device_scalar import PendingScalar, scalar
from zerowatch.runtime.devices.cuda_allocator import CudaMemory
from zerowatch.runtime.monitor.step_ring import recover

MIB = 2**20
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
FAILED_KERNEL = """
import torch
from zerowatch.runtime.common import accelerator

torch.ones(1, device="cuda")
before = accelerator.has_failed()
torch.ones(4, device="cuda")[torch.full((1,), 9, device="cuda")]
try:
    torch.cuda.synchronize()
except RuntimeError:
    print(before, accelerator.has_failed())
"""


# NCCL's watchdog thread may find the failed kernel before the script does. By default it then ends
# the process. With "0" it leaves that to the script.
RETHROW = "TORCH_NCCL_RETHROW_CUDA_ERRORS"


def run_until_a_device_side_assert(folder: Path, **variables: str) -> Any:
    """Run a script that fails in step 21; return its process."""
    return start(
        sys.executable,
        SCRIPTS / "monitor" / "device_assert_job.py",
        cwd=folder,
        variables={**rank_variables(), **variables},
    )


def step_records(folder: Path) -> list[dict[str, Any]]:
    (log,) = folder.glob("runs/*/rank-0.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_after_a_device_side_assert_the_run_log_has_all_steps(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    plain = run_until_a_device_side_assert(tmp_path, ZEROWATCH_ENABLED="false", **{RETHROW: "0"})
    finished = run_until_a_device_side_assert(tmp_path, **{RETHROW: "0"})
    records = step_records(tmp_path)

    record_property(
        "exit status without and with monitoring", [plain.returncode, finished.returncode]
    )
    assert finished.returncode == plain.returncode == 1, finished.stderr[-4000:]
    assert "device-side assert" in finished.stderr
    assert "hook 'close' failed" not in finished.stderr
    assert "hook 'step records' failed" not in finished.stderr
    assert [record["step"] for record in records][:20] == list(range(1, 21))
    losses = [record.get("loss") for record in records[:20]]
    assert all(loss is None or math.isfinite(loss) for loss in losses)


def test_no_step_of_a_run_that_nccl_s_watchdog_ends_is_lost(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    finished = run_until_a_device_side_assert(tmp_path, **{RETHROW: "1"})
    recover(tmp_path / "runs", Path("/dev/shm"))  # as the next start on this host does
    records = step_records(tmp_path)

    is_aborted = finished.returncode == -signal.SIGABRT
    record_property("ended by the watchdog", is_aborted)
    record_property("steps in the run log", len(records))
    assert is_aborted or finished.returncode == 1
    steps = [record["step"] for record in records]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 20


def test_a_failed_kernel_is_recognized() -> None:
    finished = start(sys.executable, "-c", FAILED_KERNEL)

    assert finished.stdout.split() == ["False", "True"]


def test_a_copy_of_a_scalar_takes_no_memory_of_the_gpu_and_does_not_synchronize() -> None:
    source = torch.tensor(2.5, device="cuda", dtype=torch.bfloat16)
    scalar(source)  # CUDA pins the first memory here, which synchronizes
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]

    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = scalar(source)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()

    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert isinstance(pending, PendingScalar)
    assert pending.read() == 2.5


def test_a_block_that_another_stream_may_still_use_is_not_unusable() -> None:
    probe, other = CudaMemory(0, accelerator.current), torch.cuda.Stream()
    torch.cuda.empty_cache()
    block = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    before = probe.read()["unusable"]
    with torch.cuda.stream(other):
        torch.cuda._sleep(2_000_000_000)
        block.record_stream(other)
    del block

    stats = torch.cuda.memory_stats()
    after = probe.read()["unusable"]
    torch.cuda.synchronize()

    awaited = stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]
    assert awaited >= 256 * MIB
    assert after - before < 256 * MIB


def test_after_an_out_of_memory_error_the_limit_is_read_at_once() -> None:
    probe = CudaMemory(0, accelerator.current, now=lambda: 0.0)
    total = torch.cuda.get_device_properties(0).total_memory
    probe.read()
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        at_fraction = probe.read()["limit"]
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(total // 2, dtype=torch.uint8, device="cuda")
        num_ooms = torch.cuda.memory_stats()["num_ooms"]
        limit = probe.read()["limit"]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

    assert num_ooms >= 1
    assert at_fraction <= 0.25 * total
    assert limit <= 0.25 * total
