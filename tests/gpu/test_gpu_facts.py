"""What zerowatch finds out about this GPU and this torch, for the table of results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from zerowatch.runtime.cli.check.hardware import check_accelerator, check_speed
from zerowatch.runtime.cli.check.software import check_cuda
from zerowatch.runtime.cli.check.verdicts import Job
from zerowatch.runtime.common import accelerator
from zerowatch.runtime.common.torch_engine import steps_so_far
from zerowatch.runtime.devices.cuda_allocator import device_memory
from zerowatch.runtime.devices.device_probes import peak_flops_per_second
from zerowatch.runtime.devices.nvml_inventory import nvml_inventory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_the_accelerator_is_this_gpu(record_property: Callable[[str, object], None]) -> None:
    used = accelerator.current

    record_property("name", used.device_name(0))
    record_property("hardware id", used.hardware_id(0).partition("-")[0])
    assert used.kind == "cuda"
    assert used.device_count() == torch.cuda.device_count()
    assert len(used.device_uuid(0)) == 36


def test_the_peak_of_this_gpu_is_known(record_property: Callable[[str, object], None]) -> None:
    peak = peak_flops_per_second(device_index=0)

    record_property("peak TFLOP/s", None if peak is None else peak / 1e12)
    if accelerator.current.is_slice(0):
        assert peak is None
    else:
        assert peak is not None, f"{torch.cuda.get_device_name(0)} is not in devices/peak_flops.py"


def test_the_allocator_has_the_statistics_that_are_read() -> None:
    block = torch.ones(1, device="cuda")

    probe = device_memory(0, reset_peak=True)
    try:
        assert probe.own_peaks
        assert probe.read()["allocated"] >= block.nbytes
    finally:
        probe.close()


@pytest.mark.parametrize("fused", [False, True])
def test_the_steps_of_an_optimizer_are_read_from_the_gpu_but_not_into_a_graph(fused: bool) -> None:
    weights = torch.nn.Parameter(torch.ones(8, device="cuda"))
    optimizer = torch.optim.AdamW([weights], fused=fused)
    for _ in range(3):
        weights.grad = torch.ones_like(weights)
        optimizer.step()
    graph, captured = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")

    number = steps_so_far(optimizer)
    with torch.cuda.graph(graph):
        captured.add_(1)
        in_capture = steps_so_far(optimizer)
    graph.replay()

    assert optimizer.state[weights]["step"].is_cuda == fused
    assert (number, in_capture) == (3, 0 if fused else 3)
    assert captured.item() == 1


def test_zerowatch_check_measures_this_gpu_against_its_peaks(
    record_property: Callable[[str, object], None],
) -> None:
    product, copy = check_speed(Job())

    record_property("check: bf16 product TFLOP/s", product.figures["flops_per_second"] / 1e12)
    record_property("check: copy GB/s", copy.figures["bytes_per_second"] / 1e9)
    if not accelerator.current.is_slice(0):
        assert [product.verdict, copy.verdict] == ["ok", "ok"], (product.text, copy.text)
        assert "of the peak" in copy.text  # bus width and clock are read


def test_zerowatch_check_finds_no_fault_of_driver_and_device() -> None:
    inventory = nvml_inventory()
    assert inventory is not None

    cuda = check_cuda(torch.version.cuda, is_rocm=False, nvml=inventory)
    found = [*cuda, *check_accelerator(Job())]

    assert [each for each in found if each.verdict != "ok"] == []
    assert inventory.devices[0].total_bytes == pytest.approx(
        torch.cuda.get_device_properties(0).total_memory, rel=0.1
    )
