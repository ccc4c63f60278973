"""Fake out-of-memory errors, their evidence, and the context it comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerowatch.runtime.memory.forecast.peak_readings import PeakPoint, PeakPrediction, Shape
from zerowatch.runtime.memory.oom.evidence import (
    Limit,
    OomContext,
    OomEvidence,
    TrainingSetup,
)
from zerowatch.runtime.memory.oom.oom_error import OomError, find_oom_error
from zerowatch.runtime.memory.oom.predicted_savings import Layout, LayoutBytes

MIB, GIB = 2**20, 2**30

# As torch 2.13 writes them; the first from a run with `set_per_process_memory_fraction`.
ON_CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.19 GiB of "
    "which 2.07 GiB is free. Process 1839 has 322.23 MiB memory in use. Including non-PyTorch "
    "memory, this process has 77.11 GiB memory in use. 75.23 GiB allowed; Of the allocated memory "
    "74.23 GiB is allocated by PyTorch, with 17.00 MiB allocated in private pools (e.g., CUDA "
    "Graphs), and 943.54 MiB is reserved by PyTorch but unallocated. If reserved but unallocated "
    "memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation."
)
ON_CUDA_ASYNC = """\
Allocation on device 1 would exceed allowed memory. (out of memory)
Currently allocated     : 70.12 GiB
Requested               : 4.00 GiB
Device limit            : 79.11 GiB
Free (according to CUDA): 1.20 GiB
PyTorch limit (set by user-supplied memory fraction)
                        : 17179869184.00 GiB"""
ON_CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 536870912 bytes. Error code 12 (Cannot allocate memory)"
)
ERROR = OomError(kind="host allocator", device="cpu", requested_bytes=512.0 * MIB, message=ON_CPU)
CATEGORIES = {
    "parameters": 100.0 * MIB,
    "gradients": 100.0 * MIB,
    "optimizer": 200.0 * MIB,
    "activations": 400.0 * MIB,
    "comm_buffers": 40.0 * MIB,
    "other": 10.0 * MIB,
}
SETUP = TrainingSetup(
    layout=Layout(1),
    world_size=4,
    dtype="bf16",
    samples=8,
    accumulation=2,
    activation_checkpointing=False,
)


def parse_oom_error(error: BaseException) -> OomError | None:
    """Return the content of an out-of-memory error; None for others."""
    found = find_oom_error(error)
    return None if found is None else found[1]


def point(step: int, peak_bytes: float, **changes: Any) -> PeakPoint:
    fields = {
        "step": step,
        "peak_bytes": peak_bytes,
        "between_steps_bytes": 450.0 * MIB,
        "limit_bytes": 1.0 * GIB,
        "reserved_bytes": peak_bytes,
        "shapes": (Shape(8, 512),),
    }
    return PeakPoint(**(fields | changes))


def evidence(**changes: Any) -> OomEvidence:
    """Return the evidence of an error in the forward of step 61 on CPU that was not predicted."""
    base = OomEvidence(
        rank=0,
        host="node-0",
        at_unix_seconds=1e9,
        step=60,
        phase="forward",
        micro_batch=2,
        error=ERROR,
        device="cpu",
        readings={
            "allocated": 812.0 * MIB,
            "peak_allocated": 900.0 * MIB,
            "reserved": 4.0 * GIB,
            "limit": 1.0 * GIB,
        },
        categories=CATEGORIES,
        shape=Shape(8, 2048),
        peaks=[point(step, (800 + step) * MIB) for step in range(31, 61)],
        predictions={
            step: PeakPrediction(step=step, predicted_bytes=850.0 * MIB, risk_ratio=0.12)
            for step in range(40, 61)
        },
        limit=Limit(num_bytes=1.0 * GIB, name="RLIMIT_AS"),
        setup=SETUP,
    )
    return replace(base, **changes)


class FakeOomContext(OomContext):
    """The context of the same evidence; `methods` replace its methods by name."""

    def __init__(self, folder: Path | None, **methods: Callable[..., Any]) -> None:
        self._folder = folder
        self._known = evidence()
        for name, method in methods.items():
            assert hasattr(OomContext, name), name
            setattr(self, name, method)

    def folder(self) -> Path | None:
        return self._folder

    def step(self) -> int:
        return self._known.step

    def phase(self) -> str:
        return self._known.phase

    def readings(self) -> Mapping[str, Mapping[str, float]]:
        return {"cpu": self._known.readings}

    def micro_batch(self) -> int | None:
        return self._known.micro_batch

    def shape(self) -> Shape | None:
        return self._known.shape

    def categories(self, device: str) -> Mapping[str, float] | None:
        return self._known.categories

    def peaks(self, device: str) -> Sequence[PeakPoint]:
        return self._known.peaks

    def predictions(self, device: str) -> Sequence[PeakPrediction]:
        return list(self._known.predictions.values())

    def limit(self, device: str) -> Limit | None:
        return self._known.limit

    def setup(self) -> TrainingSetup | None:
        return self._known.setup

    def predict_peak(self, device: str, shape: Shape) -> float:
        return 450.0 * MIB + 70_000.0 * shape.samples * shape.length

    def estimated_layouts(self) -> Mapping[Layout, LayoutBytes]:
        return {
            Layout(1): LayoutBytes(device_bytes=300.0 * MIB, host_bytes=0.0),
            Layout(2): LayoutBytes(device_bytes=225.0 * MIB, host_bytes=0.0),
            Layout(3): LayoutBytes(device_bytes=150.0 * MIB, host_bytes=0.0),
        }
