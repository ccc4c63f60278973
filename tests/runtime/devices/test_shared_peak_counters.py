"""The script and zerowatch both read correct peaks, although both reset the counters."""

from __future__ import annotations

import inspect

import pytest
import torch
from fakes.cuda_memory import FakeAllocator, FakeCudaMemory

from zerowatch.runtime.devices.cuda_allocator import CudaMemory
from zerowatch.runtime.devices.shared_peak_counters import (
    ACCELERATOR_RESET,
    ACCELERATOR_STATS,
    RESET,
    STATS,
    SharedPeakCounters,
)

NAMES = (STATS, RESET, ACCELERATOR_STATS, ACCELERATOR_RESET)


def peak_for_script(allocator: FakeAllocator) -> int:
    return allocator._cuda_memoryStats(0)["allocated_bytes"]["all"]["peak"]


def peak_for_zerowatch(peaks: SharedPeakCounters) -> int:
    return peaks.drain(0)["allocated_bytes"]["all"]["peak"]


@pytest.fixture
def allocator() -> FakeAllocator:
    return FakeAllocator()


@pytest.fixture
def torch_on(allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    """Make torch's own functions call the fake allocator."""
    for name in NAMES:
        function = getattr(allocator, name)
        monkeypatch.setattr(torch._C, name, function, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: True)
    for module in (torch.cuda.memory, torch.accelerator.memory):
        monkeypatch.setattr(module, "_get_device_index", lambda *_, **__: 0)
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    return allocator


def test_a_peak_is_read_once_and_stays_visible_to_the_script(allocator: FakeAllocator) -> None:
    peaks = SharedPeakCounters(allocator)
    allocator.use(900)
    allocator.use(100)

    own = [peak_for_zerowatch(peaks), peak_for_zerowatch(peaks)]

    assert own == [900, 100]
    assert peak_for_script(allocator) == 900


def test_a_new_higher_peak_is_visible_at_once(allocator: FakeAllocator) -> None:
    peaks = SharedPeakCounters(allocator)
    allocator.use(900)
    peaks.drain(0)

    allocator.use(1000)
    allocator.use(100)

    assert peak_for_script(allocator) == 1000


def test_a_reset_by_the_script_loses_no_peak_of_zerowatch(allocator: FakeAllocator) -> None:
    peaks = SharedPeakCounters(allocator)
    allocator.use(900)
    allocator.use(100)

    allocator._cuda_resetPeakMemoryStats(0)
    allocator.use(200)

    assert peak_for_script(allocator) == 200
    assert peak_for_zerowatch(peaks) == 900
    assert peak_for_zerowatch(peaks) == 200
    assert peak_for_script(allocator) == 200


def test_nothing_but_peaks_is_changed(allocator: FakeAllocator) -> None:
    peaks = SharedPeakCounters(allocator)
    allocator.use(900)
    before = allocator._cuda_memoryStats(0)

    peaks.drain(0)

    assert allocator._cuda_memoryStats(0) == before


def test_a_freed_pool_has_no_entry(allocator: FakeAllocator) -> None:
    peaks = SharedPeakCounters(allocator)
    allocator.use(900)
    peaks.drain(0)

    allocator.has_pool = False

    assert allocator._cuda_memoryStats(0)["reserved_bytes_by_private_pools"] == {}


def test_peaks_of_different_devices_are_separate(allocator: FakeAllocator) -> None:
    peaks = SharedPeakCounters(allocator)
    allocator.use(900)
    peaks.drain(0)
    allocator.use(100)

    allocator._cuda_resetPeakMemoryStats(1)

    assert peak_for_script(allocator) == 900


def test_the_original_functions_are_restored(allocator: FakeAllocator) -> None:
    before = [getattr(allocator, name) for name in NAMES]
    peaks = SharedPeakCounters(allocator)
    wrapped = [getattr(allocator, name) for name in NAMES]

    peaks.restore()
    peaks.restore()

    assert all(own is not theirs for own, theirs in zip(wrapped, before, strict=True))
    assert [getattr(allocator, name) for name in NAMES] == before


def test_a_kept_wrapper_passes_through_after_restore(
    allocator: FakeAllocator,
) -> None:
    peaks = SharedPeakCounters(allocator)
    imported_by_value = allocator._cuda_memoryStats
    allocator.use(900)
    peaks.drain(0)
    allocator.use(100)
    peaks.drain(0)

    peaks.restore()

    assert imported_by_value(0)["allocated_bytes"]["all"]["peak"] == 100


def test_functions_that_torch_lacks_are_skipped(allocator: FakeAllocator) -> None:
    del allocator._accelerator_getDeviceStats, allocator._accelerator_resetPeakStats
    peaks = SharedPeakCounters(allocator)
    allocator.use(900)
    peaks.drain(0)

    assert peak_for_script(allocator) == 900
    peaks.restore()
    assert not hasattr(allocator, ACCELERATOR_STATS)


def test_torch_s_peak_functions_return_the_same_as_unwrapped(torch_on: FakeAllocator) -> None:
    peaks = SharedPeakCounters(torch._C)
    torch_on.use(900)
    readers = [
        torch.cuda.max_memory_allocated,
        torch.cuda.max_memory_reserved,
        torch.accelerator.max_memory_allocated,
        torch.accelerator.max_memory_reserved,
        lambda: torch.cuda.memory_stats()["allocated_bytes.all.peak"],
        lambda: torch.cuda.memory_stats_as_nested_dict()["active_bytes"]["small_pool"]["peak"],
    ]
    summary = torch.cuda.memory_summary()
    try:
        peaks.drain(0)
        torch_on.use(100)
        peaks.drain(0)
        torch_on.use(900)

        assert [read() for read in readers] == [900] * len(readers)
        assert torch.cuda.memory_summary() == summary
    finally:
        peaks.restore()


@pytest.mark.parametrize("module", [torch.cuda, torch.accelerator])
def test_torch_s_own_reset_clears_the_script_s_view(torch_on: FakeAllocator, module) -> None:
    peaks = SharedPeakCounters(torch._C)
    torch_on.use(900)
    peaks.drain(0)
    torch_on.use(100)
    try:
        module.reset_peak_memory_stats()

        assert module.max_memory_allocated() == 100
    finally:
        peaks.restore()


def test_torch_calls_the_functions_that_are_wrapped() -> None:
    sources = {
        STATS: torch.cuda.memory.memory_stats_as_nested_dict,
        RESET: torch.cuda.memory.reset_peak_memory_stats,
        ACCELERATOR_STATS: torch.accelerator.memory.memory_stats,
        ACCELERATOR_RESET: torch.accelerator.memory.reset_peak_memory_stats,
    }

    for name, function in sources.items():
        assert f"torch._C.{name}(" in inspect.getsource(function)


def test_the_probe_reads_each_step_s_own_peak_until_it_is_closed(allocator: FakeAllocator) -> None:
    original = allocator._cuda_memoryStats
    cuda = FakeCudaMemory(free=30, total=80)
    probe = CudaMemory(0, cuda, peaks=SharedPeakCounters(allocator))
    allocator.use(900)
    allocator.use(100)

    steps = [probe.read()["peak_allocated"] for _ in range(2)]
    probe.close()

    assert steps == [900, 100]
    assert allocator._cuda_memoryStats is original


def test_a_probe_that_resets_reads_nothing_before_cuda_is_in_use(allocator: FakeAllocator) -> None:
    cuda = FakeCudaMemory(free=30, total=80)
    cuda.initialized = False

    assert CudaMemory(0, cuda, peaks=SharedPeakCounters(allocator)).read() == {}
