"""CUDA memory on a real GPU, compared with torch's own statistics."""

from __future__ import annotations

import threading

import pytest
import torch

from zerowatch.metrics.catalog.memory import MEMORY_PEAK, MEMORY_STATES
from zerowatch.runtime.common import accelerator
from zerowatch.runtime.devices.cuda_allocator import device_memory
from zerowatch.runtime.devices.host_memory import HostMemory

MIB = 2**20
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_all_states_are_read_and_agree_with_torch() -> None:
    block = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")

    readings = device_memory(0, reset_peak=False).read()

    peaks = {f"peak_{state}" for state in MEMORY_PEAK.labels[1].values}
    assert set(readings) == {*MEMORY_STATES, *peaks, "limit", "alloc_retries", "unusable"}
    assert readings["allocated"] == torch.cuda.memory_allocated(0) >= block.numel()
    assert readings["reserved"] == torch.cuda.memory_reserved(0)
    assert readings["peak_allocated"] == torch.cuda.max_memory_allocated(0)
    assert readings["peak_reserved"] == torch.cuda.max_memory_reserved(0)


def test_reading_does_not_change_torch_s_peak() -> None:
    block = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
    del block
    peak = torch.cuda.max_memory_allocated(0)

    device_memory(0, reset_peak=False).read()

    assert torch.cuda.max_memory_allocated(0) == peak


def test_the_limit_does_not_depend_on_what_torch_holds() -> None:
    torch.ones(1, device="cuda")
    before = device_memory(0, reset_peak=False).read()["limit"]

    block = torch.ones(1024 * MIB, dtype=torch.uint8, device="cuda")
    after = device_memory(0, reset_peak=False).read()["limit"]

    assert block.numel() == 1024 * MIB
    assert after == pytest.approx(before, abs=64 * MIB)
    assert after < torch.cuda.get_device_properties(0).total_memory


def test_pinned_memory_of_the_host_is_in_use_there() -> None:
    torch.ones(1).pin_memory()  # loads CUDA
    probe = HostMemory(reset_peak=False)
    before = probe.read()["allocated"]

    pinned = torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True).fill_(1)

    # The kernel counts it as shared memory, not as a mapped file.
    assert probe.read()["allocated"] - before == pytest.approx(pinned.numel(), abs=16 * MIB)


def test_reading_on_another_thread_does_not_break_a_graph_capture() -> None:
    tensor = torch.zeros(8, device="cuda")
    tensor.add_(1)  # loads the kernel, which a capture must not do
    tensor.zero_()
    torch.cuda.synchronize()
    readings = []
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        tensor.add_(1)
        thread = threading.Thread(
            target=lambda: readings.append(device_memory(0, reset_peak=False).read())
        )
        thread.start()
        thread.join()
    graph.replay()
    torch.cuda.synchronize()

    assert readings[0]["limit"] > 0
    assert tensor.sum().item() == 8


def test_what_is_free_in_the_pool_of_a_captured_graph_is_unusable() -> None:
    def unusable() -> float:
        return device_memory(0, reset_peak=False).read()["unusable"]

    torch.zeros(1, dtype=torch.uint8, device="cuda")  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    before = unusable()
    with torch.cuda.graph(graph):
        torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")  # freed at once
    accelerator.current.captured_graphs[id(graph)] = graph  # as the hooks of streams do

    captured = unusable()
    del graph
    freed = unusable()

    assert captured - before >= 256 * MIB
    assert freed - before < 256 * MIB
