"""Trains on two GPUs, and reports on which of them each rank has a CUDA context: `FOLDER`.

Each context takes half a gigabyte of its GPU. At the end each rank uses GPU 0, which shows that the
report would contain such a context.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gpu.jobs import engines

import zerowatch

STEPS = 60
STEP_SECONDS = 0.05
SETTINGS = {
    "serve": {"enabled": False},
    "run_log": {"folder": "runs"},
    "sampling": {"exact_collectives_steps": 1},
    "cross_rank": {"interval_seconds": 0.5},
}


def main() -> None:
    engines.meet()
    engine = engines.make_engine(engines.layers(256, 3), engines.ds_config(2))
    batch = torch.randn(4, 256, device=engine.device)
    engines.step(engine, batch).item()
    before = engines.contexts()
    watch = zerowatch.watch(engine, SETTINGS)
    for number in range(STEPS):
        watch.log_values({"loss": engines.step(engine, batch)}, number)
        time.sleep(STEP_SECONDS)  # the threads of monitoring run once a second
    during, pids = engines.contexts(), pids_on_gpu_0()
    dist.barrier()  # each rank is still there while the others read the ids
    watch.close()
    after = engines.contexts()
    torch.ones(1, device="cuda:0" if engines.ON_CUDA else "cpu")
    engines.report(
        {
            "pid": os.getpid(),
            "pids on GPU 0": pids,
            "before": before,
            "during": during,
            "after": after,
            "after use of GPU 0": engines.contexts(),
            "logged": num_logged(watch.run_folder),
            "failures": engines.hook_failures(watch),
        }
    )


def num_logged(folder: Path | None) -> int:
    """Return how many lines of `log_values` are in the run folder. Rank 0 writes them."""
    assert folder is not None
    return len((folder / "logged.jsonl").read_text().splitlines()) if dist.get_rank() == 0 else 0


def pids_on_gpu_0() -> list[int]:
    """Return NVML's list of the processes that compute on torch's GPU 0.

    It is empty in a container that does not show the processes of the host.
    """
    if not engines.ON_CUDA:
        return []
    import pynvml

    pynvml.nvmlInit()
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    found = [each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)]
    pynvml.nvmlShutdown()
    return found


if __name__ == "__main__":
    main()
