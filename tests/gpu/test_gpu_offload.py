"""Bytes moved by offload on a real GPU, compared with the copies recorded by CUPTI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.rank_jobs import run_code

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SCRIPT = """
import sys
import deepspeed, torch
from torch.profiler import ProfilerActivity, profile
from zerowatch.metrics.catalog.memory import OFFLOAD_BYTES, OFFLOAD_SECONDS
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.collectives.event_pool import EventPool
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.memory.offload.traffic import OffloadTraffic

zero, trace = json.loads(sys.argv[1]), sys.argv[2]
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
engine = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters()),
    config={
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    },
)[0]

def train(steps):
    for _ in range(2 * steps):
        x = torch.ones(2, 1024, device="cuda", dtype=torch.bfloat16)
        engine.backward(engine(x).square().mean())
        engine.step()
    torch.cuda.synchronize()

train(2)
fail_open = FailOpen()
traffic = OffloadTraffic(engine, fail_open, EventPool())
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
    train(2)
profiler.export_chrome_trace(trace)
recorder = Recorder()
traffic.publish(recorder)
assert not fail_open.failures, fail_open.failures
values = recorder.snapshot().values
out(**{
    labels[0]: [values[OFFLOAD_BYTES][labels], values[OFFLOAD_SECONDS][labels]]
    for labels in values[OFFLOAD_BYTES]
})
"""
CPU = {"device": "cpu", "pin_memory": True}
CASES: dict[str, dict[str, Any]] = {
    "stage 2": {"stage": 2, "offload_optimizer": CPU},
    "stage 3": {"stage": 3, "offload_optimizer": CPU},
    "stage 3, params too": {
        "stage": 3,
        "offload_optimizer": CPU,
        "offload_param": CPU,
        "stage3_param_persistence_threshold": 0,
    },
}


def copied(trace: Path, arrow: str) -> tuple[int, float]:
    """Return the bytes and seconds of the copies in one direction, `DtoH` or `HtoD`."""
    events = json.loads(trace.read_text())["traceEvents"]
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and arrow in e["name"]]
    return sum(e["args"]["bytes"] for e in copies), sum(e["dur"] for e in copies) / 1e6


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_copies_that_the_profiler_saw(name: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"

    found = run_code(SCRIPT, json.dumps(CASES[name]), str(trace))

    for direction, arrow in (("to_host", "DtoH"), ("to_device", "HtoD")):
        num_bytes, seconds = found[direction]
        seen_bytes, seen_seconds = copied(trace, arrow)
        assert 0.99 * seen_bytes <= num_bytes <= seen_bytes  # the rest are norms and flags
        assert seconds >= 0.9 * seen_seconds  # stretches hold more than their copies
