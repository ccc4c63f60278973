"""Lists the checks of `make verify-gpu`: their part, their time limits, and what they need."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Of a part, from its first check on. A machine may be lent for ten minutes at a time.
PART_SECONDS = 540
PARTS = {
    1: "what all other figures rest on",
    2: "what changes a run",
    3: "cost, and runs that end",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Tests that run in a process of their own, with a time limit.

    Attributes:
        name: Its name on the command line.
        subject: The row of the README that it belongs to.
        shows: What is true if it passes.
        files: The test files, in `tests/gpu/`.
        limit_seconds: The process is ended after this time.
        num_gpus: GPUs that it needs.
        needs_nvcc: Whether DeepSpeed compiles kernels in it.
        select: Further options of pytest that select tests.
    """

    name: str
    part: int
    subject: str
    shows: str
    files: Sequence[str]
    limit_seconds: int
    num_gpus: int = 1
    needs_nvcc: bool = False
    select: Sequence[str] = ()

    @property
    def needs(self) -> str:
        """What it needs beside one GPU, in brackets; empty if nothing."""
        needs = [f"{self.num_gpus} GPUs"] if self.num_gpus > 1 else []
        needs += ["nvcc"] if self.needs_nvcc else []
        return f" [{', '.join(needs)}]" if needs else ""

    def missing(self, num_gpus: int) -> str | None:
        """Return what this machine lacks, or None."""
        if num_gpus < self.num_gpus:
            return f"needs {self.num_gpus} GPUs"
        return missing_for_deepspeed_kernels() if self.needs_nvcc else None


def find_nvcc() -> str | None:
    """Return the path of CUDA's compiler as torch finds it, or None."""
    from torch.utils.cpp_extension import CUDA_HOME

    beside = Path(CUDA_HOME or "", "bin", "nvcc")
    return str(beside) if CUDA_HOME and beside.exists() else shutil.which("nvcc")


def nvcc_version() -> str | None:
    """Return the version of CUDA's compiler, such as "12.8", or None."""
    nvcc = find_nvcc()
    if nvcc is None:
        return None
    try:
        done = subprocess.run([nvcc, "-V"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release (\d+\.\d+)", done.stdout)
    return found[1] if found else None


def missing_for_deepspeed_kernels() -> str | None:
    """Return why DeepSpeed cannot compile kernels here, or None if it can.

    DeepSpeed compiles only if nvcc has the version of CUDA with which torch was built
    (`assert_no_cuda_mismatch`). Some minor versions may differ.
    """
    import torch

    version = nvcc_version()
    if version is None:
        return "needs nvcc, which compiles kernels of DeepSpeed"
    try:
        from deepspeed.ops.op_builder.builder import cuda_minor_mismatch_ok
    except ImportError as error:
        return f"needs DeepSpeed's compilation of kernels ({error})"
    wanted = ".".join((torch.version.cuda or "").split(".")[:2])
    alike = cuda_minor_mismatch_ok.get(int(version.split(".")[0]), ())
    is_skipped = os.environ.get("DS_SKIP_CUDA_CHECK") == "1"
    if version == wanted or is_skipped or (version in alike and wanted in alike):
        return None
    return f"needs nvcc of CUDA {wanted}, with which torch was built; found {version}"


def has_python_header() -> bool:
    """Return whether extension modules of this Python can be compiled."""
    return Path(sysconfig.get_path("include"), "Python.h").exists()


def missing_for_triton() -> str | None:
    """Return what torch.compile lacks on a GPU here, or None.

    Triton compiles a small extension module of Python for each kernel.
    """
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which torch.compile uses"
    if not any(map(shutil.which, filter(None, [os.environ.get("CC"), "gcc", "clang"]))):
        return "needs a C compiler, which triton uses: gcc, clang or CC"
    if not has_python_header():
        return "needs Python.h, which triton uses: the package python3-dev"
    return None


SAME, COMMUNICATION, MEMORY = "training is unchanged", "communication", "memory"
TIMES, DEVICES, ERRORS = "phases and step times", "utilization, power and health", "errors"
RUN, COST, SEVERAL = "TrainingRun and its changes", "cost of monitoring", "several GPUs"
SUBJECTS = (SAME, COMMUNICATION, TIMES, MEMORY, DEVICES, ERRORS, RUN, COST, SEVERAL)

# In the order in which they run: what matters most comes first, as a part may end early.
CHECKS = (
    Check(
        name="facts",
        part=1,
        subject=DEVICES,
        shows="versions; the peak FLOP/s of this GPU are in the table; `zerowatch check` reaches a "
        "usual share of them",
        files=["test_gpu_facts.py"],
        limit_seconds=90,
    ),
    Check(
        name="same-training",
        part=1,
        subject=SAME,
        shows="weights bitwise equal with and without monitoring, ZeRO 0 to 3 and offload; "
        "calls and bytes equal the Flight Recorder's",
        files=["test_gpu_same_training.py"],
        limit_seconds=180,
        select=["-k", "not several"],
    ),
    Check(
        name="streams",
        part=1,
        subject=SAME,
        shows="no stream of the script waits for a collective because of monitoring, no kernel "
        "waits behind a stream of monitoring, and no memory is kept in steps that are not sampled",
        files=["test_gpu_streams.py"],
        limit_seconds=90,
    ),
    Check(
        name="synchronizations",
        part=1,
        subject=SAME,
        shows="monitoring adds no synchronization; a window of TrainingRun waits once",
        files=["test_gpu_synchronizations.py"],
        limit_seconds=120,
    ),
    Check(
        name="exposed",
        part=1,
        subject=COMMUNICATION,
        shows="time of collectives and exposed time within 3 % of the script's own measurement",
        files=["test_gpu_exposed.py"],
        limit_seconds=150,
    ),
    Check(
        name="kineto",
        part=1,
        subject=COMMUNICATION,
        shows="time of collectives and exposed time within 3 % of kineto's kernels",
        files=["test_gpu_kineto.py"],
        limit_seconds=90,
        select=["-k", "not several"],
    ),
    Check(
        name="collectives",
        part=1,
        subject=COMMUNICATION,
        shows="NCCL's calls are timed without waiting; a captured graph stays whole",
        files=["test_gpu_collectives.py"],
        limit_seconds=90,
    ),
    Check(
        name="phases",
        part=1,
        subject=TIMES,
        shows="phases are times of the compute stream, within 3 % of its kernels; steps add up to "
        "the script's own measurement within 1 %",
        files=["test_gpu_phases.py"],
        limit_seconds=90,
    ),
    Check(
        name="memory",
        part=1,
        subject=MEMORY,
        shows="states, peaks and limits equal torch's statistics",
        files=["test_gpu_memory.py"],
        limit_seconds=60,
    ),
    Check(
        name="devices",
        part=1,
        subject=DEVICES,
        shows="NVML's fields, busy seconds and health in plausible figures",
        files=["test_gpu_devices.py"],
        limit_seconds=90,
    ),
    Check(
        name="encoding",
        part=1,
        subject=RUN,
        shows="compressed values have the bytes that a CPU writes",
        files=["test_gpu_compression.py"],
        limit_seconds=60,
        select=["-k", "not training and not several"],
    ),
    Check(
        name="engine-memory",
        part=1,
        subject=MEMORY,
        shows="categories add up to the bytes requested of the allocator within 0.1 %",
        files=["test_gpu_engine_memory.py"],
        limit_seconds=150,
    ),
    Check(
        name="same-training-ranks",
        part=1,
        subject=SEVERAL,
        shows="weights, calls and bytes as above, on two ranks",
        files=["test_gpu_same_training.py"],
        limit_seconds=180,
        num_gpus=2,
        select=["-k", "several"],
    ),
    Check(
        name="kineto-ranks",
        part=1,
        subject=SEVERAL,
        shows="times of NCCL's kernels between two GPUs, and exposed time, within 3 % of kineto's",
        files=["test_gpu_kineto.py"],
        limit_seconds=120,
        num_gpus=2,
        select=["-k", "several"],
    ),
    Check(
        name="rebuild",
        part=2,
        subject=RUN,
        shows="rebuilds through ZeRO 0, 1, 2, 3, offload and 0 with AdamW keep the training state "
        "and return the memory",
        files=["test_gpu_rebuild.py"],
        limit_seconds=120,
        select=["-k", "not fused"],
    ),
    Check(
        name="recovery",
        part=2,
        subject=RUN,
        shows="windows that ran out of memory are replayed with equal weights",
        files=["test_gpu_recovery.py"],
        limit_seconds=150,
        select=["-m", "not slow"],
    ),
    Check(
        name="live-settings",
        part=2,
        subject=RUN,
        shows="live settings, activation checkpointing and optimizer offload, applied and undone",
        files=["test_gpu_live_settings.py"],
        limit_seconds=120,
    ),
    Check(
        name="compression",
        part=2,
        subject=RUN,
        shows="training with compressed gradients of each format",
        files=["test_gpu_compression.py"],
        limit_seconds=90,
        select=["-k", "training and not several"],
    ),
    Check(
        name="out-of-memory",
        part=2,
        subject=ERRORS,
        shows="errors of the allocator are parsed, predicted and reported",
        files=["test_gpu_oom.py"],
        limit_seconds=150,
    ),
    Check(
        name="rebuild-fused",
        part=2,
        subject=RUN,
        shows="rebuilds as above with FusedAdam",
        files=["test_gpu_rebuild.py"],
        limit_seconds=240,
        needs_nvcc=True,
        select=["-k", "fused"],
    ),
    Check(
        name="ranks",
        part=2,
        subject=SEVERAL,
        shows="a slow GPU is a straggler; a hang is reported with the missing rank; no rank has a "
        "context on the GPU of another; errors on one rank are replayed without a hang of NCCL",
        files=["test_gpu_several.py"],
        limit_seconds=300,
        num_gpus=2,
    ),
    Check(
        name="compression-ranks",
        part=2,
        subject=SEVERAL,
        shows="training with compressed gradients over NCCL",
        files=["test_gpu_compression.py"],
        limit_seconds=90,
        num_gpus=2,
        select=["-k", "several"],
    ),
    Check(
        name="cost",
        part=3,
        subject=COST,
        shows="step time, peak reserved memory and allocator retries of a model with 1.2 billion "
        "parameters, monitored over unmonitored",
        files=["test_gpu_cost.py"],
        limit_seconds=270,
        select=["-k", "large_model and not several"],
    ),
    Check(
        name="short-steps",
        part=3,
        subject=COST,
        shows="step time of a model whose steps wait for Python, monitored over unmonitored",
        files=["test_gpu_cost.py"],
        limit_seconds=270,
        select=["-k", "short_steps"],
    ),
    Check(
        name="separate-process",
        part=3,
        subject=COST,
        shows="with process.separate: weights as without monitoring, calls and bytes of the Flight "
        "Recorder; step time of a model whose steps wait for Python, and CPU time of our threads",
        files=["test_gpu_separate_process.py"],
        limit_seconds=300,
    ),
    Check(
        name="hot-path",
        part=3,
        subject=COST,
        shows="microseconds that monitoring adds to a call of NCCL; NCCL's own timing",
        files=["test_gpu_hot_path.py"],
        limit_seconds=90,
    ),
    Check(
        name="errors",
        part=3,
        subject=ERRORS,
        shows="no step is lost after a device-side assert, even if NCCL's watchdog ends the "
        "process; readings survive a full GPU",
        files=["test_gpu_errors.py"],
        limit_seconds=90,
    ),
    Check(
        name="graphs",
        part=3,
        subject=SAME,
        shows="torch.compile and CUDA graphs train as without monitoring",
        files=["test_gpu_graphs.py"],
        limit_seconds=240,
    ),
    Check(
        name="demo",
        part=3,
        subject=TIMES,
        shows="`zerowatch demo` has all figures of cuda:0 and no failed hook",
        files=["test_gpu_demo.py"],
        limit_seconds=120,
    ),
    Check(
        name="offload",
        part=3,
        subject=MEMORY,
        shows="bytes moved by offload equal the copies that CUPTI recorded",
        files=["test_gpu_offload.py"],
        limit_seconds=120,
    ),
    Check(
        name="estimate",
        part=3,
        subject=MEMORY,
        shows="traced activations within 10 % of the allocator's peak",
        files=["test_gpu_estimate.py"],
        limit_seconds=60,
    ),
    Check(
        name="prediction",
        part=3,
        subject=MEMORY,
        shows="next peaks are predicted within 1 %",
        files=["test_gpu_prediction.py"],
        limit_seconds=180,
    ),
    Check(
        name="cost-ranks",
        part=3,
        subject=SEVERAL,
        shows="step time, memory and retries as above at ZeRO 3 on two GPUs",
        files=["test_gpu_cost.py"],
        limit_seconds=270,
        num_gpus=2,
        select=["-k", "several"],
    ),
    Check(
        name="generation",
        part=3,
        subject=TIMES,
        shows="generation at ZeRO 2 and 3: weights as without monitoring, tokens counted exactly, "
        "the times of steps and of generation as the script measures them",
        files=["test_gpu_generation.py"],
        limit_seconds=150,
        select=["-k", "plain"],
    ),
    Check(
        name="generation-hybrid",
        part=3,
        subject=TIMES,
        shows="generation as above with DeepSpeed's hybrid engine",
        files=["test_gpu_generation.py"],
        limit_seconds=300,
        needs_nvcc=True,
        select=["-k", "hybrid"],
    ),
)
