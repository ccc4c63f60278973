"""Checks of the devices: accelerator, NVML, allocator settings, and the rates that they reach."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...common import accelerator
from ...common.format_numbers import format_bytes
from ...devices.nvml_inventory import GpuFacts, NvmlInventory, nvml_inventory
from ...devices.peak_flops import gpu_peak_flops_per_second, measure_cpu_flops_per_second
from .verdicts import Finding, Job, failed, ok, skipped, warning

if TYPE_CHECKING:
    import torch

_ALLOCATOR_VARIABLES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
)
# Options of torch 2.13's allocator (c10/core/AllocatorConfig.h, c10/cuda/CUDAAllocatorConfig.h).
# torch built for CPU accepts any option; torch built for CUDA refuses those that it does not have.
_ALLOCATOR_OPTIONS = frozenset(
    [
        "backend",
        "expandable_segments",
        "garbage_collection_threshold",
        "graph_capture_record_stream_reuse",
        "large_segment_size_mb",
        "max_non_split_rounding_mb",
        "max_split_size_mb",
        "per_process_memory_fraction",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "roundup_power2_divisions",
        "throw_on_cudamalloc_oom",
    ]
)
# A product of large matrices reaches some 70 % of the peak in data sheets, a copy within the device
# 85 to 90 %. Below these ratios the device is throttled, shared or broken.
_LEAST_MATMUL_RATIO = 0.5
_LEAST_COPY_RATIO = 0.6
_LEAST_FREE_RATIO = 0.9
_MATMUL_SIDE = 8192
_COPY_BYTES = 2**30
_CPU_COPY_BYTES = 2**26
_REPEATS = 10
# With several GPUs and without the persistence daemon, the driver takes tens of seconds to start.
DRIVER_SECONDS = 90
# Present where the driver of NVIDIA, of AMD, or of Windows Subsystem for Linux is loaded.
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_ASK_DRIVER = f"""
from {accelerator.__name__} import current
if current.is_available():
    for index in range(current.device_count()):
        current.device_name(index)
"""
_RESTART = (
    "take this host out of the job, look for XID errors (dmesg | grep -E 'NVRM|Xid'), and restart "
    "the host; if it happens again, have the card, its seat and its power supply checked"
)
# What to do about the errors of NVML with which no process can use the GPU, by their number in
# nvml.h: GPU_IS_LOST, RESET_REQUIRED and GPU_NOT_FOUND.
_LOST_ADVICE = {
    15: _RESTART,
    16: "end the processes that use the GPU, and reset it (nvidia-smi --gpu-reset -i INDEX), or "
    "restart the host",
    28: _RESTART,
}


def driver_answers() -> bool:
    """Return whether the driver of the GPUs answers a separate process.

    In this process, a call of a driver that hangs could hold the lock of the interpreter, and then
    no time limit works. A process that hangs in the driver may not end by a signal either, so it is
    not waited for.
    """
    if not accelerator.current.is_built() or not any(map(os.path.exists, _DRIVER_FILES)):
        return True
    asking = subprocess.Popen(
        [sys.executable, "-c", _ASK_DRIVER],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        asking.wait(DRIVER_SECONDS)
    except subprocess.TimeoutExpired:
        asking.kill()
        with suppress(subprocess.TimeoutExpired):
            asking.wait(1)
        return False
    return True


def check_accelerator(job: Job) -> Iterator[Finding]:
    """Report the device, DeepSpeed's choice of it, and the backend of its process groups."""
    if not job.driver_answers:
        yield failed(
            f"the driver of the GPUs does not answer within {DRIVER_SECONDS} s; nothing that needs "
            "a GPU is checked",
            "look for errors of the driver (dmesg | grep -E 'NVRM|Xid|amdgpu'), and restart the "
            "host",
        )
        return
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    device, chosen = accelerator.current, str(get_accelerator().device_name())
    if not device.is_available():
        yield ok(f"CPU: DeepSpeed's accelerator is {chosen}; torch sees no GPU")
    elif chosen != device.kind:
        yield warning(
            f"DeepSpeed trains on {chosen}, although torch sees {device.device_count()} GPU(s)",
            f"unset DS_ACCELERATOR={os.environ.get('DS_ACCELERATOR')}, unless you want that",
        )
    else:
        yield from _check_gpus(job)
    backend = "nccl" if chosen == "cuda" else "gloo"
    if not dist.is_backend_available(backend):
        yield failed(
            f"backend: torch was built without {backend}",
            "install a torch from https://pytorch.org/get-started/locally",
        )
    elif backend == "gloo":
        yield _check_host_name(job)
    else:
        yield ok("backend: nccl")


def _check_gpus(job: Job) -> Iterator[Finding]:
    device = accelerator.current
    count = device.device_count()
    if job.local_ranks > count:
        yield failed(
            f"{job.local_ranks} ranks on this host, but torch sees {count} GPU(s) "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')})",
            "start fewer ranks, or make more GPUs visible",
        )
    architectures = [arch for arch in device.module.get_arch_list() if arch.startswith("sm_")]
    built_for = [int(arch[3:].rstrip("af")) for arch in architectures]
    for index in range(count):
        major, minor = device.module.get_device_capability(index)
        name = f"{device.kind}:{index} {device.device_name(index)}"
        # A binary for an earlier minor version of the same generation runs too.
        if built_for and not any(arch // 10 == major and arch % 10 <= minor for arch in built_for):
            yield failed(
                f"{name} has compute capability {major}.{minor}; torch was built for "
                f"{', '.join(architectures)}",
                "install a torch built for this GPU",
            )
        else:
            yield ok(name)


def _check_host_name(job: Job) -> Finding:
    """Check that gloo on several hosts does not choose the loopback interface."""
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        return warning(
            f"backend: gloo; the host name {host} does not resolve ({error.strerror})",
            "add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME to the network interface",
        )
    if (
        job.has_other_hosts
        and address.startswith("127.")
        and "GLOO_SOCKET_IFNAME" not in os.environ
    ):
        return warning(
            f"backend: gloo; the host name {host} resolves to {address}, which other hosts do not "
            "reach",
            "set GLOO_SOCKET_IFNAME to the interface that reaches the other hosts, such as eth0",
        )
    return ok(f"backend: gloo; the host name {host} resolves to {address}")


def check_nvml(job: Job) -> Iterator[Finding]:
    """Report what NVML reads, lost GPUs, whether memory is free, and links below their width."""
    import torch

    if torch.version.hip is not None:
        yield skipped(
            "NVML: torch was built for ROCm; utilization, power and health of AMD GPUs are not read"
        )
        return
    inventory = nvml_inventory()
    if inventory is None:
        if accelerator.current.is_available():
            yield warning(
                "NVML does not answer: no utilization, power, temperature or health of GPUs",
                "install the driver's libnvidia-ml.so.1 where the job runs",
            )
        else:
            yield skipped("no NVIDIA driver")
        return
    if not inventory.devices:
        yield skipped(f"the driver {inventory.driver} has no GPU")
    hidden, has_slices = _hidden_gpus(inventory), _has_slices()
    for number, gpu in enumerate(inventory.devices):
        if gpu.uuid in hidden:
            chosen = os.environ["CUDA_VISIBLE_DEVICES"]
            yield skipped(f"GPU {number} {gpu.name}: hidden by CUDA_VISIBLE_DEVICES={chosen}")
        else:
            yield from check_gpu(number, gpu, is_sliced=has_slices)


def _has_slices() -> bool:
    """Return whether the job runs in MIG slices, whose GPUs other jobs may use too."""
    device = accelerator.current
    if not device.is_available():
        return False
    return any(device.is_slice(index) for index in range(device.device_count()))


def _hidden_gpus(inventory: NvmlInventory) -> set[str]:
    """Return the UUIDs of the GPUs that CUDA_VISIBLE_DEVICES hides from the job.

    The set is empty if torch does not see all devices that the variable names: one may be lost. It
    is also empty for MIG slices, whose UUIDs are not those of their GPUs.
    """
    device, chosen = accelerator.current, os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not device.is_available():
        return set()
    seen = {f"GPU-{device.device_uuid(index)}" for index in range(device.device_count())}
    every = {gpu.uuid for gpu in inventory.devices}
    return every - seen if len(seen) == len(chosen.split(",")) and seen <= every else set()


def check_gpu(number: int, gpu: GpuFacts, *, is_sliced: bool = False) -> Iterator[Finding]:
    """Report faults of one GPU.

    Args:
        number: NVML's index.
        gpu: What NVML reports.
        is_sliced: Whether the job runs in MIG slices. The memory of the other slices is not its
            own, so it is not judged.
    """
    name, faults = f"GPU {number} {gpu.name}", 0
    if gpu.error is not None and gpu.error[0] in _LOST_ADVICE:
        code, reason = gpu.error
        yield failed(f"{name}: the driver does not reach it: {reason}", _LOST_ADVICE[code])
        return
    if gpu.total_bytes and gpu.used_bytes is not None and not is_sliced:
        free = gpu.total_bytes - gpu.used_bytes
        if free < _LEAST_FREE_RATIO * gpu.total_bytes:
            faults += 1
            users = ", ".join(map(str, gpu.processes)) or "not visible from here"
            yield warning(
                f"{name}: {format_bytes(gpu.used_bytes)} of {format_bytes(gpu.total_bytes)} are in "
                f"use; processes: {users}",
                "end what else runs there, or set memory.device_limit_bytes",
                used_bytes=float(gpu.used_bytes),
            )
    # The generation falls while the GPU is idle; the number of lanes does not.
    if gpu.pcie and gpu.pcie_best and gpu.pcie[1] < gpu.pcie_best[1]:
        faults += 1
        yield warning(
            f"{name}: PCIe uses {gpu.pcie[1]} lanes of {gpu.pcie_best[1]}",
            "have the seat of the card, the riser and the slot checked",
            lanes=float(gpu.pcie[1]),
        )
    if faults:
        return
    if gpu.used_bytes is None:
        reason = "" if gpu.error is None else f": {gpu.error[1]}"
        yield ok(f"{name}: NVML does not report its memory{reason}")
    elif is_sliced:
        yield ok(f"{name}: read by NVML; the job uses MIG slices, so memory in use is not judged")
    else:
        yield ok(f"{name}: read by NVML, {format_bytes(gpu.total_bytes)}, unused")


def check_allocator(job: Job) -> Iterator[Finding]:
    """Check the settings of torch's allocator, also where there is no GPU to use them."""
    given = {name: os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)}
    faults = [fault for name, text in given.items() for fault in _allocator_faults(name, text)]
    yield from faults
    if faults:
        return
    shown = ", ".join(f"{name}={text}" for name, text in given.items())
    if not accelerator.current.is_available():
        yield ok(f"{shown}: valid") if given else skipped("torch's allocator of GPU memory: no GPU")
    elif accelerator.current.has_expandable_segments():
        yield ok("expandable segments are on, which avoids most fragmentation")
    else:
        yield warning(
            f"expandable segments are off ({shown or 'PYTORCH_CUDA_ALLOC_CONF is not set'}): "
            "fragmentation can end in an out-of-memory error although memory is free",
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )


def _allocator_faults(name: str, text: str) -> Iterator[Finding]:
    import torch

    example = f"write it as {name}=expandable_segments:True,max_split_size_mb:128"
    without_lists = re.sub(r"\[[^\]]*\]", "", text)  # such as roundup_power2_divisions:[256:1,>:8]
    unknown = set(re.findall(r"(?:^|,)\s*([^:,\[\]]+):", without_lists)) - _ALLOCATOR_OPTIONS
    for option in sorted(unknown):
        yield warning(
            f"{name}: {option!r} is no option of torch 2.13's allocator, which refuses it on a GPU",
            example,
        )
    parse = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if parse is None:  # torch before 2.9 parses it when it first uses the device
        return
    try:
        parse(text)
    except (ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        yield failed(f"{name}={text} is not valid: {reason}", example)


def check_speed(job: Job) -> Iterator[Finding]:
    """Measure the rate of a matrix product and of a copy, on the device of this rank."""
    device = accelerator.current
    if not device.is_available():
        yield _cpu_matmul()
        yield _cpu_copy()
        return
    index = job.local_rank % device.device_count()
    name, number_type = device.device_name(index), _number_type(index)
    yield rate_finding(
        f"{device.kind}:{index} {name}: {number_type} product of {_MATMUL_SIDE} x {_MATMUL_SIDE}",
        _gpu_matmul(index, number_type),
        gpu_peak_flops_per_second(name),
        "FLOP/s",
        _LEAST_MATMUL_RATIO,
    )
    yield rate_finding(
        f"{device.kind}:{index} {name}: copy within the device",
        _gpu_copy(index),
        _memory_peak(device.device_uuid(index)),
        "B/s",
        _LEAST_COPY_RATIO,
    )
    device.empty_cache()  # the next checks, and NCCL, need memory too


def rate_finding(
    subject: str, rate: float, peak: float | None, unit: str, least_ratio: float
) -> Finding:
    """Compare a measured rate with the device's peak.

    Args:
        subject: What was measured, and where.
        rate: What was measured, in `unit`.
        peak: The peak of the device, in `unit`; None if it is not known.
        unit: "FLOP/s" or "B/s".
        least_ratio: Ratio of the peak below which the device is slower than it should be.
    """
    figures = {"flops_per_second" if unit == "FLOP/s" else "bytes_per_second": rate}
    text = f"{subject}: {_rate(rate, unit)}"
    if peak is None:
        return ok(f"{text}; the peak of this device is not known", **figures)
    text = f"{text}, {rate / peak:.0%} of the peak {_rate(peak, unit)}"
    if rate >= least_ratio * peak:
        return ok(text, **figures)
    return warning(
        f"{text}; {least_ratio:.0%} and more is usual",
        "look for other processes and lowered clocks: nvidia-smi -q -d PERFORMANCE,CLOCK,POWER",
        **figures,
    )


def _rate(rate: float, unit: str) -> str:
    return f"{rate / 1e12:.3g} T{unit}" if rate >= 1e12 else f"{rate / 1e9:.3g} G{unit}"


def _memory_peak(uuid: str) -> float | None:
    inventory = nvml_inventory()
    found = [gpu for gpu in inventory.devices if gpu.uuid == f"GPU-{uuid}"] if inventory else []
    return found[0].memory_bytes_per_second if found else None


def _number_type(index: int) -> str:
    """Return the type of the peak in the table: bf16, or fp16 on a GPU that only emulates bf16."""
    module = accelerator.current.module
    with module.device(index):
        return "bf16" if module.is_bf16_supported(False) else "fp16"


def _gpu_matmul(index: int, number_type: str) -> float:
    import torch

    side, dtype = _MATMUL_SIDE, torch.bfloat16 if number_type == "bf16" else torch.float16
    with torch.inference_mode():
        matrix = torch.ones(side, side, dtype=dtype, device=_torch_device(index))
        return 2 * side**3 / _gpu_seconds(index, lambda: torch.mm(matrix, matrix))


def _gpu_copy(index: int) -> float:
    import torch

    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=_torch_device(index))
    target = torch.empty_like(source)
    # Each byte is read and written.
    return 2 * _COPY_BYTES / _gpu_seconds(index, lambda: target.copy_(source))


def _torch_device(index: int) -> str:
    return f"{accelerator.current.kind}:{index}"


def _gpu_seconds(index: int, work: Callable[[], torch.Tensor]) -> float:
    """Return the shortest time of several repetitions, by the device's clock."""
    device = accelerator.current
    events: list[tuple[Any, Any]] = []
    with device.module.device(index):
        work()
        for _ in range(_REPEATS):
            began, ended = (device.Event(enable_timing=True) for _ in range(2))
            began.record()
            work()
            ended.record()
            events.append((began, ended))
        device.module.synchronize()
    return float(min(began.elapsed_time(ended) for began, ended in events)) / 1000


def _cpu_matmul() -> Finding:
    import torch

    rate = measure_cpu_flops_per_second()
    threads = torch.get_num_threads()
    subject = f"CPU, {threads} thread(s): fp32 product"
    if rate is None:
        return warning(
            f"{subject}: below 8 GFLOP/s per thread, because the threads wait for each other",
            "end other jobs on these cores, or set OMP_NUM_THREADS to the cores of this rank",
        )
    return ok(f"{subject}: {_rate(rate, 'FLOP/s')}", flops_per_second=rate)


def _cpu_copy() -> Finding:
    import torch

    source = torch.ones(_CPU_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    rate = 2 * _CPU_COPY_BYTES / min(times)
    return ok(
        f"CPU: copy of {format_bytes(_CPU_COPY_BYTES)}: {_rate(rate, 'B/s')}", bytes_per_second=rate
    )
