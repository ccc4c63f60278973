"""Tests of the parsing of out-of-memory errors: texts of CUDA, and real errors on CPU."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from fakes.ooms import GIB, MIB, ON_CPU, ON_CUDA, ON_CUDA_ASYNC, parse_oom_error
from torch.utils.data import DataLoader

from zerowatch.runtime.memory.oom.oom_error import OomError, is_caused_by_oom

HUGE = 2**50  # bytes that no machine grants, even with overcommit

TEXTS = {
    "torch's allocator on CUDA": (ON_CUDA, "device allocator", "cuda:1", 2.0 * GIB),
    "the same on AMD": (ON_CUDA.replace("CUDA", "HIP"), "device allocator", "cuda:1", 2.0 * GIB),
    "the same in small": (
        "CUDA out of memory. Tried to allocate 512 bytes. GPU 0 has a total capacity of 1.00 GiB "
        "of which 0 bytes is free.",
        "device allocator",
        "cuda:0",
        512.0,
    ),
    "cudaMallocAsync": (ON_CUDA_ASYNC, "device allocator", "cuda:1", 4.0 * GIB),
    "the runtime": (
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some "
        "other API call",
        "device library",
        "cuda",
        None,
    ),
    "the driver": ("CUDA driver error: out of memory", "device library", "cuda", None),
    "cuBLAS": (
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "device library",
        "cuda",
        None,
    ),
    "cuDNN": ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "device library", "cuda", None),
    "cuDNN from 9 on": (
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "device library",
        "cuda",
        None,
    ),
    "NCCL": (
        "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with NCCL_DEBUG=INFO "
        "for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed."
        "\nLast error:\nCuda failure 2 'out of memory'",
        "device library",
        "cuda",
        None,
    ),
    "NCCL's own buffers": (
        "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.27.5\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Failed to CUDA calloc async 608 bytes",
        "device library",
        "cuda",
        None,
    ),
    "NCCL's large buffers": (
        "Failed to CUDA malloc 6291456 bytes",
        "device library",
        "cuda",
        None,
    ),
    "NCCL's pinned buffers": ("Failed to CUDA host alloc 64 bytes", "device library", "cuda", None),
    "an extension, in CUDA's words alone": ("out of memory", "unknown", "unknown", None),
    "an extension": ("Triton Error [CUDA]: out of memory", "device library", "cuda", None),
    "an extension, with its place": (
        "kernel.cu:41: Out of memory.\nsee the log",
        "unknown",
        "unknown",
        None,
    ),
    "torch's allocator on the host": (ON_CPU, "host allocator", "cpu", 512.0 * MIB),
    "the same on Windows": (
        "[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: not enough memory: you "
        "tried to allocate 1048576 bytes.",
        "host allocator",
        "cpu",
        1.0 * MIB,
    ),
    "C++": ("std::bad_alloc", "python", "cpu", None),
    "a mapping": (
        "unable to mmap 4000000000 bytes from file </data/f>: Cannot allocate memory (12)",
        "operating system",
        "cpu",
        4e9,
    ),
}
OTHERS = {
    "a shape": "mat1 and mat2 shapes cannot be multiplied (8x4 and 5x6)",
    "no more threads": "can't start new thread",
    "a number too large": "Storage size calculation overflowed with sizes=[4611686018427387904]",
    "locked memory": "Call to ibv_reg_mr failed with error Cannot allocate memory",
    "another NCCL error": "unhandled cuda error\nLast error:\nCuda failure 1 'invalid argument'",
    "a script's own words": "the cache is out of memory slots",
    "a peer": "another rank ran out of memory in this window",
    "a worker's shared memory": "DataLoader worker is killed: out of shared memory",
}


@pytest.mark.parametrize("case", TEXTS)
def test_kind_device_and_request_are_parsed_from_the_text(case: str) -> None:
    text, kind, device, requested = TEXTS[case]

    parsed = parse_oom_error(RuntimeError(text))

    assert parsed is not None
    assert (parsed.kind, parsed.device, parsed.requested_bytes) == (kind, device, requested)


@pytest.mark.parametrize("case", OTHERS)
def test_other_errors_are_not_out_of_memory(case: str) -> None:
    assert parse_oom_error(RuntimeError(OTHERS[case])) is None
    assert parse_oom_error(ValueError("CUDA out of memory")) is None


def test_of_many_lines_the_line_of_the_error_is_kept() -> None:
    parsed = parse_oom_error(RuntimeError(f"the layer failed:\n  {ON_CPU}\nsee above\n"))

    assert parsed is not None
    assert parsed.message == ON_CPU


def test_torch_s_own_type_is_recognized_with_any_text() -> None:
    parsed = parse_oom_error(torch.OutOfMemoryError("the allocator gives up"))

    assert parsed is not None
    assert (parsed.kind, parsed.device) == ("device allocator", "unknown")
    assert parsed.message == "the allocator gives up"


def test_a_memory_error_of_python_in_cuda_s_words_is_the_hosts() -> None:
    parsed = parse_oom_error(MemoryError("out of memory"))

    assert parsed is not None
    assert (parsed.kind, parsed.device) == ("python", "cpu")
    assert parsed.message == "out of memory"


def test_all_sizes_of_cuda_s_text_are_parsed() -> None:
    parsed = parse_oom_error(torch.OutOfMemoryError(ON_CUDA))

    assert parsed is not None
    assert parsed.reported_bytes == {
        "total": 79.19 * GIB,
        "free": 2.07 * GIB,
        "in_use": 77.11 * GIB,
        "allowed": 75.23 * GIB,
        "allocated": 74.23 * GIB,
        "private_pools": 17.0 * MIB,
        "reserved_unallocated": 943.54 * MIB,
    }


def test_the_sizes_of_the_text_of_cuda_malloc_async_are_parsed() -> None:
    parsed = parse_oom_error(torch.OutOfMemoryError(ON_CUDA_ASYNC))

    assert parsed is not None
    assert parsed.message == ON_CUDA_ASYNC.splitlines()[0]
    assert parsed.reported_bytes == {"allocated": 70.12 * GIB, "free": 1.2 * GIB}


@pytest.fixture
def little_room() -> Iterator[None]:
    """Limit this process to 256 MiB more than it has."""
    status = Path("/proc/self/status").read_text()
    size = int(status.partition("VmSize:")[2].split()[0]) * 1024
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + 256 * MIB, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


class Growing(torch.autograd.Function):
    """A function that requests too much memory in its backward pass."""

    @staticmethod
    def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.empty(HUGE // 4)


REAL: dict[str, tuple[Callable[[], object], str, float | None]] = {
    "empty": (lambda: torch.empty(HUGE // 4), "host allocator", HUGE),
    "matmul": (
        lambda: torch.ones(20000, 10) @ torch.ones(10, 20000),
        "host allocator",
        4 * 20000**2,
    ),
    "in backward": (
        lambda: Growing.apply(torch.ones(3, requires_grad=True)).sum().backward(),
        "host allocator",
        HUGE,
    ),
    "a storage that grows": (
        lambda: torch.empty(3).untyped_storage().resize_(HUGE),
        "host allocator",
        HUGE,
    ),
    "numpy": (lambda: numpy.ones(2**47), "python", HUGE),
    "Python": (lambda: bytearray(HUGE), "python", None),
}


@pytest.mark.parametrize("case", REAL)
def test_real_errors_on_cpu_are_recognized(case: str, little_room: None) -> None:
    body, kind, requested = REAL[case]

    with pytest.raises((RuntimeError, MemoryError)) as raised:
        body()

    parsed = parse_oom_error(raised.value)
    assert parsed is not None
    assert (parsed.kind, parsed.device, parsed.requested_bytes) == (kind, "cpu", requested)


class TooLarge(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.make()


def too_large_a_tensor() -> torch.Tensor:
    return torch.empty(HUGE // 4)


def too_large_an_array() -> torch.Tensor:
    return torch.from_numpy(numpy.ones(2**47))


@pytest.mark.parametrize("make", [too_large_a_tensor, too_large_an_array])
def test_a_data_loader_s_worker_is_named_without_its_stack(
    make: Callable[[], torch.Tensor],
) -> None:
    loader = DataLoader(TooLarge(make), num_workers=1)

    batches: Any = iter(loader)
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        next(batches)
    # Else the collector ends the worker, in any later test: one with a fake clock waits forever.
    batches._shutdown_workers()

    parsed = parse_oom_error(raised.value)
    assert parsed is not None
    assert parsed.worker == "DataLoader worker process 0"
    assert parsed.requested_bytes == HUGE
    assert "Traceback" not in parsed.message
    assert "File" not in parsed.message


def context() -> BaseException:
    try:
        raise MemoryError("no room")
    except MemoryError:
        try:
            raise KeyError("cleaning up failed too")
        except KeyError as error:
            return error


def cause() -> BaseException:
    error = RuntimeError("the layer failed")
    error.__cause__ = torch.OutOfMemoryError(ON_CUDA)
    return error


def suppressed() -> BaseException:
    error = context()
    error.__suppress_context__ = True
    return error


def cycle() -> BaseException:
    first, second = RuntimeError("one"), RuntimeError("two")
    first.__cause__, second.__cause__ = second, first
    return first


CHAINS: dict[str, tuple[Callable[[], BaseException], str | None]] = {
    "raised while it was handled": (context, "cpu"),
    "its cause": (cause, "cuda:1"),
    "in a group": (lambda: ExceptionGroup("several", [ValueError(), cause()]), "cuda:1"),
    "suppressed by `from None`": (suppressed, None),
    "a cycle of others": (cycle, None),
}


@pytest.mark.parametrize("case", CHAINS)
def test_causes_contexts_and_groups_are_searched(case: str) -> None:
    make, device = CHAINS[case]

    parsed = parse_oom_error(make())

    assert (parsed and parsed.device) == device


def test_enomem_is_out_of_memory_and_other_os_errors_are_not() -> None:
    refused = OSError(errno.ENOMEM, "Cannot allocate memory")

    assert parse_oom_error(refused) == OomError(
        kind="operating system",
        device="cpu",
        requested_bytes=None,
        message="[Errno 12] Cannot allocate memory",
    )
    assert parse_oom_error(OSError(errno.ENOSPC, "No space left on device")) is None


@pytest.mark.parametrize("make, expected", [(cycle, False), (cause, True), (context, False)])
def test_only_causes_count_and_a_cycle_of_them_ends(
    make: Callable[[], BaseException], expected: bool
) -> None:
    assert is_caused_by_oom(make()) is expected
