"""GPUs of the host by the real pynvml, which loads a scripted library in place of NVIDIA's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fakes.nvml_library import NvmlLibrary

from zerowatch.runtime.cli.check.hardware import check_gpu, rate_finding
from zerowatch.runtime.cli.check.software import check_cuda, check_nvcc
from zerowatch.runtime.cli.check.verdicts import Finding, Verdict
from zerowatch.runtime.devices.nvml_inventory import NvmlInventory, nvml_inventory

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> NvmlLibrary:
    return NvmlLibrary(monkeypatch, tmp_path / "nvml.txt")


def inventory(library: NvmlLibrary, **figures: object) -> NvmlInventory:
    library.script({name.replace("__", "."): value for name, value in figures.items()})
    found = nvml_inventory()
    assert found is not None
    return found


def of_gpu(library: NvmlLibrary, **figures: object) -> list[Finding]:
    script = {f"0.{name}": value for name, value in figures.items()}
    library.script(script)
    return list(check_gpu(0, inventory(library).devices[0]))


def test_driver_and_gpus_are_listed_and_nvml_is_closed(library: NvmlLibrary) -> None:
    found = inventory(library)

    (gpu,) = found.devices
    assert (found.driver, found.cuda_version) == ("580.95.05", (13, 0))
    assert gpu.name == "NVIDIA H100 80GB HBM3"
    # The data sheet of the H100 SXM has 3.35 TB/s.
    assert gpu.memory_bytes_per_second == pytest.approx(3.35e12, rel=0.01)
    assert library.left_open == (0, 0)


def test_a_figure_that_the_driver_refuses_is_unknown(library: NvmlLibrary) -> None:
    found = inventory(library, cuda_version=None, **{"0__memory_total": None, "0__bus_width": None})

    (gpu,) = found.devices
    assert (found.cuda_version, gpu.total_bytes, gpu.memory_bytes_per_second) == (None, None, None)


@pytest.mark.parametrize("error", [15, 16, 28], ids=["lost", "needs a reset", "not found"])
@pytest.mark.parametrize("refused", ["memory", "handle"])
def test_a_gpu_that_the_driver_does_not_reach_has_failed(
    library: NvmlLibrary, monkeypatch: pytest.MonkeyPatch, error: int, refused: str
) -> None:
    def refuse(index: int) -> None:
        raise library.pynvml.NVMLError(error)

    if refused == "handle":
        monkeypatch.setattr(library.pynvml, "nvmlDeviceGetHandleByIndex", refuse)

    (finding,) = of_gpu(library, lost=error)

    assert finding.verdict is Verdict.FAILED
    assert str(library.pynvml.NVMLError(error)) in finding.text
    assert "unused" not in finding.text
    assert ("--gpu-reset" in finding.advice) == (error == 16)
    assert "restart the host" in finding.advice
    assert library.left_open == (0, 0)


def test_a_gpu_whose_memory_the_driver_does_not_report_is_not_called_unused(
    library: NvmlLibrary,
) -> None:
    (finding,) = of_gpu(library, memory_total=None)

    assert finding.verdict is Verdict.OK
    assert "unused" not in finding.text
    assert str(library.pynvml.NVMLError(3)) in finding.text


def test_an_unused_gpu_is_well(library: NvmlLibrary) -> None:
    (finding,) = of_gpu(library)

    assert finding.verdict is Verdict.OK
    assert "79.6 GiB" in finding.text


def test_a_gpu_that_another_process_fills_is_named_with_the_process(library: NvmlLibrary) -> None:
    (finding,) = of_gpu(library, memory_used=60 * 2**30, process=4711)

    assert finding.verdict is Verdict.WARNING
    assert "60.0 GiB of 79.6 GiB" in finding.text
    assert "4711" in finding.text


def test_a_card_on_half_of_its_lanes_is_named(library: NvmlLibrary) -> None:
    (finding,) = of_gpu(library, pcie_lanes=8)

    assert finding.verdict is Verdict.WARNING
    assert "8 lanes of 16" in finding.text


def test_a_driver_older_than_torchs_cuda_is_named(library: NvmlLibrary) -> None:
    found = inventory(library, cuda_version=12020, driver="535.104.05")

    (finding,) = check_cuda("13.0", is_rocm=False, nvml=found)

    assert finding.verdict is Verdict.FAILED
    assert "535.104.05 supports CUDA 12.2" in finding.text
    # Minor versions fit each other.
    assert [each.verdict for each in check_cuda("12.8", is_rocm=False, nvml=found)] == ["ok"]


def test_a_gpu_beside_a_torch_without_cuda_is_named(library: NvmlLibrary) -> None:
    (finding,) = check_cuda(None, is_rocm=False, nvml=inventory(library))

    assert finding.verdict is Verdict.FAILED
    assert "NVIDIA H100 80GB HBM3" in finding.text


@pytest.mark.parametrize(
    ("release", "verdict"),
    [("12.8", "ok"), ("12.4", "ok"), ("11.8", "failed"), ("13.0", "failed"), (None, "warning")],
)
def test_nvcc_must_fit_torchs_cuda_as_deepspeed_wants_it(release: str, verdict: str) -> None:
    assert check_nvcc(release, "12.8", "/usr/local/cuda").verdict == verdict


@pytest.mark.parametrize(
    ("rate", "peak", "verdict"),
    [(700e12, 989e12, "ok"), (300e12, 989e12, "warning"), (300e12, None, "ok")],
)
def test_a_device_far_below_its_peak_is_named(rate: float, peak: float, verdict: str) -> None:
    finding = rate_finding("cuda:0", rate, peak, "FLOP/s", 0.5)

    assert finding.verdict == verdict
    assert finding.figures == {"flops_per_second": rate}
