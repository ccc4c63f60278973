"""The measurement of a CPU's peak, with products that take scripted times.

`tests/runtime/instrumentation/test_flops.py` measures this machine, and looks GPUs up.
"""

from __future__ import annotations

import logging

import pytest
import torch

from zerowatch.runtime.devices import peak_flops
from zerowatch.runtime.devices.peak_flops import (
    gpu_peak_flops_per_second,
    measure_cpu_flops_per_second,
)


class Machine:
    """A CPU with a steady rate, in FLOP/s. The first product takes a second longer.

    Attributes:
        sides: The side of each product's matrices.
        types: The types of their elements.
    """

    def __init__(self, rate: float) -> None:
        self.sides: list[int] = []
        self.types: set[torch.dtype] = set()
        self._rate = rate
        self._seconds = 50.0

    def mm(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        self._seconds += 2 * one.shape[0] ** 3 / self._rate + (0.0 if self.sides else 1.0)
        self.sides.append(one.shape[0])
        self.types.add(one.dtype)
        return one

    def perf_counter(self) -> float:
        return self._seconds

    def thread_time(self) -> float:
        return self._seconds - 49.0


def machine(monkeypatch: pytest.MonkeyPatch, rate: float, threads: int = 1) -> Machine:
    cpu = Machine(rate)
    monkeypatch.setattr(peak_flops, "time", cpu)
    monkeypatch.setattr(torch, "mm", cpu.mm)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    return cpu


@pytest.mark.parametrize(
    ("rate", "largest", "num_products"),
    [
        # 35 ms in products of 0.336 ms: one of 512 would take 2.7 ms.
        (1e11, 256, 105),
        # 0.17 ms, then products of 1.34 ms: one of 1024 would take 10.7 ms.
        (2e11, 512, 27),
        # 0.0034, 0.027 and 0.21 ms, then products of 1.7 ms.
        (1e13, 2048, 24),
        # Products of 0.17 ms: one of 4096 would take 1.4 ms, but is not tried.
        (1e14, 2048, 207),
    ],
)
def test_the_matrices_grow_until_a_product_would_take_2_ms(
    rate: float, largest: int, num_products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = machine(monkeypatch, rate)

    assert measure_cpu_flops_per_second() == pytest.approx(rate)
    assert cpu.sides[:2] == [256, 256]
    assert set(cpu.sides) == {side for side in (256, 512, 1024, 2048) if side <= largest}
    assert len(cpu.sides) == pytest.approx(num_products, abs=2)
    assert cpu.types == {torch.float32}


@pytest.mark.parametrize(
    ("rate", "threads", "is_plausible"),
    [(7.9e9, 1, False), (8.1e9, 1, True), (23.9e9, 3, False), (24.1e9, 3, True)],
)
def test_a_rate_below_8_gflops_per_thread_is_implausible(
    rate: float,
    threads: int,
    is_plausible: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine(monkeypatch, rate, threads)
    caplog.set_level(logging.INFO)

    measured = measure_cpu_flops_per_second()

    assert measured == (pytest.approx(rate) if is_plausible else None)
    assert caplog.messages == (
        []
        if is_plausible
        else ["cpu: too busy to measure peak FLOP/s, MFU not published; set flops.peak_per_second"]
    )


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA GH200 144G HBM3e", 989e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA A800-SXM4-80GB", 312e12),
        ("NVIDIA A30", 165e12),
        ("NVIDIA A40", 149.7e12),
        ("NVIDIA L40", 181e12),
        ("Tesla T4", 65e12),
        ("A100-SXM4-40GB", 312e12),
        ("NVIDIA GeForce RTX 2080", None),
    ],
)
def test_each_product_has_the_figure_of_its_data_sheet(name: str, flops: float | None) -> None:
    assert gpu_peak_flops_per_second(name) == flops
