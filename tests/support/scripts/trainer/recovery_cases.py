"""The model, the engines and the faults of the out-of-memory matrix."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

WIDTH, WANTED, SAMPLES = 12, 3, 8
# Mapped and never touched, which takes no time. glibc, once an allocation has failed, maps 64 MiB
# for another heap: what is left over for one sample must be more than that.
PER_SAMPLE_BYTES = 512 * 2**20
ON_HOST = {"device": "cpu"}
# What the ds configs of all engines have in common.
CONFIG = {
    "train_micro_batch_size_per_gpu": WANTED,
    "gradient_clipping": 1.0,
    "steps_per_print": 10**9,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
ON_CUDA = os.environ.get("DS_ACCELERATOR") == "cuda"


@dataclass(frozen=True)
class Fault:
    """Memory that holds `fits` samples in one place, and no more.

    Attributes:
        place: The pass in which it is short.
        block: Of the model, by number.
        micro_batch: By number within an attempt.
        fits: Samples that are not too many.
        ranks: On which ranks.
        is_real: Whether the allocator fails, under a limit on addresses; else an error is raised.
    """

    place: Literal["forward", "backward"]
    block: int
    micro_batch: int
    fits: int
    ranks: Literal["one", "all"]
    is_real: bool

    @property
    def name(self) -> str:
        how = "real" if self.is_real else "simulated"
        return (
            f"{how}, {self.ranks}, {self.place}, block {self.block}, "
            f"micro-batch {self.micro_batch}, {self.fits} fit"
        )

    @property
    def expected(self) -> int:
        """The size that the window ends with: halved, rounded up, until it fits."""
        size = WANTED
        while size > self.fits:
            size = -(-size // 2)
        return size

    def strikes(self, rank: int) -> bool:
        return self.ranks == "all" or rank == 1


def zero(stage: int, **options) -> dict:
    # By default a bucket takes two GB, mapped again in each backward.
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000, **options}}


BF16 = {"bf16": {"enabled": True}}
SMALL_3 = {
    "reduce_bucket_size": 300,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 0,
}
EAGER_3 = {
    "reduce_bucket_size": 900,
    "stage3_prefetch_bucket_size": 2000,
    "stage3_param_persistence_threshold": 20,
    "stage3_max_reuse_distance": 0,
}
ENGINES = {
    "stage 0": zero(0),
    "stage 0, bf16": {**zero(0), **BF16, "data_types": {"grad_accum_dtype": "bf16"}},
    "stage 1": zero(1),
    "stage 1, bf16 with fp32 gradients": {
        **zero(1),
        **BF16,
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "stage 1, optimizer on host": zero(1, offload_optimizer=ON_HOST),
    "stage 2": zero(2),
    "stage 2, small buckets": zero(2, reduce_bucket_size=300),
    "stage 2, overlapping": zero(2, overlap_comm=True, reduce_bucket_size=300),
    "stage 2, gradients not contiguous": zero(2, contiguous_gradients=False),
    "stage 2, reduce per owner": zero(2, use_multi_rank_bucket_allreduce=False),
    "stage 2, timed": {**zero(2), "wall_clock_breakdown": True},
    "stage 2, bf16": {**zero(2), **BF16},
    "stage 2, optimizer on host": zero(2, offload_optimizer=ON_HOST, reduce_bucket_size=300),
    "stage 3": zero(3),
    "stage 3, small buckets": zero(3, **SMALL_3),
    "stage 3, eager prefetching": zero(3, **EAGER_3),
    "stage 3, overlapping": zero(3, overlap_comm=True, **EAGER_3),
    "stage 3, all-reduce": zero(3, reduce_scatter=False, **SMALL_3),
    "stage 3, bf16": {**zero(3, **EAGER_3), **BF16},
    "stage 3, optimizer on host": zero(3, offload_optimizer=ON_HOST, **SMALL_3),
    "stage 3, all on host": zero(3, offload_optimizer=ON_HOST, offload_param=ON_HOST, **EAGER_3),
}
FAULTS = [
    Fault(place, block, micro_batch, fits, ranks, is_real)
    for is_real in (False, True)
    for ranks in ("one", "all")
    for place in ("forward", "backward")
    for block in (0, 2)
    for micro_batch, fits in ((0, 2), (1, 2), (2, 1))
]
# The most different ones: a few faults of each engine.
FEW_ENGINES = (
    "stage 0",
    "stage 1, bf16 with fp32 gradients",
    "stage 2, overlapping",
    "stage 2, optimizer on host",
    "stage 3, eager prefetching",
    "stage 3, all on host",
)
FEW_ALONE = ("stage 2, overlapping", "stage 3, all on host")  # on one rank
FEW_FAULTS = [
    Fault("backward", 0, 1, 2, "one", is_real=False),
    Fault("forward", 2, 2, 1, "one", is_real=True),
    Fault("backward", 2, 0, 2, "all", is_real=True),
    Fault("forward", 0, 0, 2, "all", is_real=False),
]


class Scarce(torch.autograd.Function):
    """Identity module that allocates memory in forward or in backward."""

    @staticmethod
    def forward(ctx, x, fault):
        ctx.fault, ctx.held = fault, None
        if fault.place == "forward":
            ctx.held = take(x, fault)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fault.place == "backward":
            ctx.held = take(gradient, ctx.fault)
        return gradient.clone(), None


def take(x: torch.Tensor, fault: Fault) -> torch.Tensor | None:
    samples = len(x)
    if fault.is_real:
        return torch.empty(samples * PER_SAMPLE_BYTES, dtype=torch.uint8, device=x.device)
    if samples > fault.fits:
        raise allocator_error(samples)
    return None


def allocator_error(num_bytes: int) -> RuntimeError:
    """Return the error that torch's allocator of the CPU raises."""
    return RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate "
        f"memory: you tried to allocate {num_bytes} bytes. Error code 12 (Cannot allocate memory)"
    )


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.inner = torch.nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.drop = torch.nn.Dropout(0.2)  # shows whether a generator is not restored
        self.outer = torch.nn.Linear(3 * WIDTH + 1, WIDTH)
        self.fault: Fault | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.nn.functional.gelu(self.inner(self.norm(x))))
        hidden = hidden if self.fault is None else Scarce.apply(hidden, self.fault)
        return x + self.outer(hidden)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(3)])
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)


@contextmanager
def little_room(fault: Fault | None) -> Iterator[None]:
    """Limit the memory of this process while there is a real fault."""
    if fault is None or not fault.is_real:
        yield
        return
    room = int((fault.fits + 0.5) * PER_SAMPLE_BYTES)
    with allowed_on_device(room) if ON_CUDA else allowed_addresses(room):
        yield


@contextmanager
def allowed_addresses(room: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def allowed_on_device(room: int) -> Iterator[None]:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
