"""Determines the peak FLOP/s of a device: a table lists GPUs, and a CPU is measured."""

from __future__ import annotations

import logging
import re
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Dense FLOP/s (without 2:4 sparsity) in bf16 with fp32 accumulation, by the full name that the
# driver reports. The figures are from NVIDIA's data sheet of each product. Sparse figures are
# halved. V100 and T4 have no bf16, so their figures are for fp16. GeForce cards: the tables of the
# architectures' white papers.
_GPU_FLOPS_PER_SECOND = (
    (r"GB300|GB200", 2500e12),
    (r"B300( .*)?|B200", 2250e12),
    (r"GH200( .*)?", 989e12),
    (r"H200 NVL|H100 NVL", 835.5e12),
    (r"H200", 989e12),
    (r"H100 PCIe|H800 PCIe", 756e12),
    (r"H100 80GB HBM3|H800", 989e12),
    (r"H20", 148e12),
    (r"A100[- ].*|A800[- ].*", 312e12),
    (r"A30", 165e12),
    (r"A40", 149.7e12),
    (r"A10", 125e12),
    (r"A10G", 70e12),
    (r"RTX A6000", 154.8e12),
    (r"RTX 6000 Ada Generation", 364e12),
    (r"GeForce RTX 5090", 209.5e12),
    (r"GeForce RTX 4090", 165.2e12),
    (r"GeForce RTX 3090", 71e12),
    (r"L40S", 362e12),
    (r"L40", 181e12),
    (r"L4", 121e12),
    (r"V100S-PCIE-.*", 130e12),
    (r"V100-SXM[23]-.*", 125e12),
    (r"V100-PCIE-.*", 112e12),
    (r"T4", 65e12),
)
_VENDOR = re.compile(r"(NVIDIA|Tesla) ")

_MEASURING_SECONDS = 0.035  # the first product, which starts the thread pool, comes on top
_PRODUCT_SECONDS = 0.002  # long enough to be efficient
# Sides of the smallest and of the largest square matrices that are multiplied.
_SMALLEST = 256
_LARGEST = 2048
# A core with AVX2 reaches 30e9 and more. If threads share a core with each other or with other
# processes, they wait for each other for milliseconds, and seem to reach only 1e9 to 5e9.
_LEAST_PLAUSIBLE_PER_THREAD = 8e9


def gpu_peak_flops_per_second(name: str) -> float | None:
    """Return the peak of the GPU of this name, or None for unknown GPUs and MIG slices."""
    if " MIG " in name:
        return None
    model = _VENDOR.sub("", name)
    return next(
        (flops for pattern, flops in _GPU_FLOPS_PER_SECOND if re.fullmatch(pattern, model)), None
    )


def measure_cpu_flops_per_second() -> float | None:
    """Multiply fp32 matrices for about 40 ms. Return the best rate, or None if implausible.

    The size of the matrices doubles until one product would take more than 2 ms. torch's current
    number of threads is used, and no random number is drawn. The time of a product is the CPU time
    of this thread, which does its share of the work, so other processes do not count. If the cores
    are so busy that the threads keep waiting for each other, the result is implausible. A CPU with
    bf16 instructions can train faster than fp32 allows. Its MFU can then be above 1.
    """
    import torch

    best, side = 0.0, _SMALLEST
    with torch.inference_mode():
        matrix = _ones(side)
        torch.mm(matrix, matrix)
        deadline = time.perf_counter() + _MEASURING_SECONDS
        while time.perf_counter() < deadline:
            started = time.thread_time()
            torch.mm(matrix, matrix)
            best = max(best, _square_flops(side) / (time.thread_time() - started))
            if side < _LARGEST and _square_flops(2 * side) / best < _PRODUCT_SECONDS:
                side *= 2
                matrix = _ones(side)
    if best < _LEAST_PLAUSIBLE_PER_THREAD * torch.get_num_threads():
        logger.info(
            "cpu: too busy to measure peak FLOP/s, MFU not published; set flops.peak_per_second"
        )
        return None
    return best


def _ones(side: int) -> torch.Tensor:
    import torch

    return torch.ones(side, side, dtype=torch.float32, device="cpu")


def _square_flops(side: int) -> int:
    return 2 * side**3
