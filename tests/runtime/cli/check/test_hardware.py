"""Tests of the checks of devices that are given; those of a GPU's facts are elsewhere.

`check_gpu` and the readings of NVML are in `tests/runtime/devices/test_nvml_inventory.py`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerowatch.runtime.cli.check import hardware
from zerowatch.runtime.cli.check.hardware import (
    check_accelerator,
    check_allocator,
    check_gpu,
    check_nvml,
    check_speed,
    rate_finding,
)
from zerowatch.runtime.cli.check.verdicts import Finding, Job, Verdict
from zerowatch.runtime.common import accelerator
from zerowatch.runtime.devices.nvml_inventory import GpuFacts, NvmlInventory

GIB = 2**30


def gpu(**changes: Any) -> GpuFacts:
    facts: dict[str, Any] = {
        "name": "H100",
        "uuid": "GPU-1",
        "total_bytes": 80 * GIB,
        "used_bytes": 0,
        "processes": (),
        "memory_bytes_per_second": 3e12,
        "pcie": (5, 16),
        "pcie_best": (5, 16),
        "error": None,
    }
    return GpuFacts(**{**facts, **changes})


def plain(findings: Any) -> list[tuple[Verdict, str]]:
    return [(each.verdict, each.text) for each in findings]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [(Verdict.OK, "GPU 3 H100: read by NVML, 80.0 GiB, unused")]),
        ({"used_bytes": 8 * GIB}, [(Verdict.OK, "GPU 3 H100: read by NVML, 80.0 GiB, unused")]),
        (
            {"used_bytes": 9 * GIB},
            [
                (
                    Verdict.WARNING,
                    "GPU 3 H100: 9.00 GiB of 80.0 GiB are in use; processes: not visible from here",
                )
            ],
        ),
        (
            {"used_bytes": 9 * GIB, "processes": (7, 9), "pcie": (1, 8)},
            [
                (
                    Verdict.WARNING,
                    "GPU 3 H100: 9.00 GiB of 80.0 GiB are in use; processes: 7, 9",
                ),
                (Verdict.WARNING, "GPU 3 H100: PCIe uses 8 lanes of 16"),
            ],
        ),
        ({"pcie": (1, 16)}, [(Verdict.OK, "GPU 3 H100: read by NVML, 80.0 GiB, unused")]),
    ],
)
def test_a_gpu_is_free_and_has_all_its_lanes(
    changes: dict[str, Any], expected: list[tuple[Verdict, str]]
) -> None:
    assert plain(check_gpu(3, gpu(**changes))) == expected


@pytest.mark.parametrize(
    ("rate", "peak", "unit", "verdict", "text"),
    [
        (5e14, 1e15, "FLOP/s", Verdict.OK, "x: 500 TFLOP/s, 50% of the peak 1e+03 TFLOP/s"),
        (
            4.9e14,
            1e15,
            "FLOP/s",
            Verdict.WARNING,
            "x: 490 TFLOP/s, 49% of the peak 1e+03 TFLOP/s; 50% and more is usual",
        ),
        (
            9.5e11,
            None,
            "B/s",
            Verdict.OK,
            "x: 950 GB/s; the peak of this device is not known",
        ),
        (1e12, None, "B/s", Verdict.OK, "x: 1 TB/s; the peak of this device is not known"),
    ],
)
def test_a_rate_is_compared_with_the_peak(
    rate: float, peak: float | None, unit: str, verdict: Verdict, text: str
) -> None:
    finding = rate_finding("x", rate, peak, unit, 0.5)

    assert (finding.verdict, finding.text) == (verdict, text)
    name = "flops_per_second" if unit == "FLOP/s" else "bytes_per_second"
    assert finding.figures == {name: rate}


class FakeGpus:
    """Two GPUs of generation 9.0 that torch sees.

    Args:
        architectures: Those that torch was built for.
        segments: Whether expandable segments are on.
        bf16: Which of the GPUs have bf16 tensor cores.
    """

    kind = "cuda"

    def __init__(
        self,
        *,
        architectures: tuple[str, ...] = ("sm_90",),
        segments: bool = True,
        bf16: tuple[int, ...] = (0, 1),
    ):
        self.segments = segments
        self.current = 0
        self.is_cache_empty = False
        self.module = SimpleNamespace(
            get_arch_list=lambda: [*architectures, "compute_90"],
            get_device_capability=lambda index: (9, 0),
            device=self.used,
            is_bf16_supported=lambda including_emulation=True: (
                including_emulation or self.current in bf16
            ),
        )

    @contextmanager
    def used(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def device_name(self, index: int) -> str:
        return f"H100-{index}"

    def device_uuid(self, index: int) -> str:
        return "1"

    def has_expandable_segments(self) -> bool:
        return self.segments

    def empty_cache(self) -> None:
        self.is_cache_empty = True


def of_gpus(
    monkeypatch: pytest.MonkeyPatch, job: Job, *, chosen: str = "cuda", **gpus: Any
) -> list[tuple[Verdict, str]]:
    import deepspeed.accelerator
    import torch.distributed

    monkeypatch.setattr(accelerator, "current", FakeGpus(**gpus))
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name != "none")
    monkeypatch.setattr(
        deepspeed.accelerator,
        "get_accelerator",
        lambda: SimpleNamespace(device_name=lambda: chosen),
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("DS_ACCELERATOR", chosen)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.7")
    return plain(check_accelerator(job))


GPUS = [(Verdict.OK, "cuda:0 H100-0"), (Verdict.OK, "cuda:1 H100-1")]
NCCL = (Verdict.OK, "backend: nccl")


@pytest.mark.parametrize(
    ("architectures", "runs"),
    [
        (("sm_90",), True),
        (("sm_80", "sm_90a"), True),
        ((), True),
        (("sm_80", "sm_91"), False),
        (("sm_100",), False),
    ],
)
def test_a_gpu_needs_a_binary_of_its_generation(
    monkeypatch: pytest.MonkeyPatch, architectures: tuple[str, ...], runs: bool
) -> None:
    found = of_gpus(monkeypatch, Job(local_ranks=2), architectures=architectures)

    if runs:
        assert found == [*GPUS, NCCL]
    else:
        listed = ", ".join(architectures)
        assert found == [
            *(
                (
                    Verdict.FAILED,
                    f"cuda:{n} H100-{n} has compute capability 9.0; torch was built for {listed}",
                )
                for n in range(2)
            ),
            NCCL,
        ]


def test_more_ranks_than_gpus_and_another_accelerator_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    too_many = of_gpus(monkeypatch, Job(local_ranks=3))
    on_cpu = of_gpus(monkeypatch, Job(local_ranks=2), chosen="cpu")

    text = "3 ranks on this host, but torch sees 2 GPU(s) (CUDA_VISIBLE_DEVICES=0,1)"
    assert too_many == [(Verdict.FAILED, text), *GPUS, NCCL]
    assert on_cpu == [
        (Verdict.WARNING, "DeepSpeed trains on cpu, although torch sees 2 GPU(s)"),
        (Verdict.OK, "backend: gloo; the host name here resolves to 10.0.0.7"),
    ]


@pytest.mark.parametrize(
    ("address", "job", "interface", "verdict"),
    [
        ("127.0.1.1", Job(world_size=4, local_ranks=2), None, Verdict.WARNING),
        ("127.0.1.1", Job(world_size=4, local_ranks=2), "eth0", Verdict.OK),
        ("127.0.1.1", Job(world_size=2, local_ranks=2), None, Verdict.OK),
        ("127.0.1.1", Job(local_ranks=2), None, Verdict.OK),
        ("127.0.1.1", Job(world_size=2, num_hosts=1), None, Verdict.OK),
        ("127.0.1.1", Job(world_size=2, local_ranks=2, num_hosts=2), None, Verdict.WARNING),
        ("10.0.0.1", Job(world_size=4, local_ranks=2), None, Verdict.OK),
        (None, Job(local_ranks=2), None, Verdict.WARNING),
    ],
)
def test_gloo_on_several_hosts_needs_an_address_that_others_reach(
    monkeypatch: pytest.MonkeyPatch,
    address: str | None,
    job: Job,
    interface: str | None,
    verdict: Verdict,
) -> None:
    def resolved(name: str) -> str:
        if address is None:
            raise OSError(1, "unknown")
        return address

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(socket, "gethostbyname", resolved)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)

    finding = hardware._check_host_name(job)

    assert finding.verdict == verdict


@pytest.mark.parametrize(
    ("has_gpu", "inventory", "expected"),
    [
        (False, None, (Verdict.NOT_APPLICABLE, "no NVIDIA driver")),
        (
            True,
            None,
            (
                Verdict.WARNING,
                "NVML does not answer: no utilization, power, temperature or health of GPUs",
            ),
        ),
        (
            False,
            NvmlInventory(driver="600", cuda_version=None, devices=()),
            (Verdict.NOT_APPLICABLE, "the driver 600 has no GPU"),
        ),
        (
            True,
            NvmlInventory(driver="600", cuda_version=None, devices=(gpu(),)),
            (Verdict.OK, "GPU 0 H100: read by NVML, 80.0 GiB, unused"),
        ),
    ],
)
def test_nvml_is_needed_with_a_gpu_only(
    monkeypatch: pytest.MonkeyPatch,
    has_gpu: bool,
    inventory: NvmlInventory | None,
    expected: tuple[Verdict, str],
) -> None:
    device = SimpleNamespace(is_available=lambda: has_gpu, device_count=lambda: 0)
    monkeypatch.setattr(accelerator, "current", device)
    monkeypatch.setattr(hardware, "nvml_inventory", lambda: inventory)

    assert plain(check_nvml(Job())) == [expected]


def test_amd_gpus_need_no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(hardware, "nvml_inventory", lambda: None)
    monkeypatch.setattr(accelerator, "current", SimpleNamespace(is_available=lambda: True))

    assert plain(check_nvml(Job())) == [
        (
            Verdict.NOT_APPLICABLE,
            "NVML: torch was built for ROCm; utilization, power and health of AMD GPUs are not "
            "read",
        )
    ]


BUSY, LOST = {"used_bytes": 70 * GIB}, {"error": (15, "GPU is lost")}


@pytest.mark.parametrize(
    ("chosen", "seen", "other", "hidden"),
    [
        ("1", ["1"], BUSY, True),
        ("1", ["1"], LOST, True),
        ("GPU-1", ["1"], BUSY, True),
        (None, ["0", "1"], BUSY, False),
        ("0,1", ["0", "1"], BUSY, False),
        ("1,0", ["1"], LOST, False),  # torch does not see the lost GPU
        ("MIG-5", ["5"], LOST, False),
        ("", [], BUSY, False),
    ],
)
def test_a_gpu_that_the_job_cannot_use_is_not_judged(
    monkeypatch: pytest.MonkeyPatch,
    chosen: str | None,
    seen: list[str],
    other: dict[str, Any],
    hidden: bool,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    device = SimpleNamespace(
        is_available=lambda: bool(seen),
        device_count=lambda: len(seen),
        device_uuid=lambda index: seen[index],
        is_slice=lambda index: (chosen or "").startswith("MIG"),
    )
    devices = (gpu(uuid="GPU-0", **other), gpu(uuid="GPU-1"))
    inventory = NvmlInventory(driver="600", cuda_version=None, devices=devices)
    monkeypatch.setattr(accelerator, "current", device)
    monkeypatch.setattr(hardware, "nvml_inventory", lambda: inventory)

    first, second = check_nvml(Job())

    expected = Verdict.WARNING if other is BUSY else Verdict.FAILED
    assert first.verdict == (Verdict.NOT_APPLICABLE if hidden else expected)
    assert first.text.startswith("GPU 0 H100") and (f"={chosen}" in first.text) == hidden
    assert second.verdict == Verdict.OK


def test_in_slices_the_memory_in_use_is_not_judged_but_lanes_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other jobs use the other slices, and the other GPUs of the host."""
    device = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        device_uuid=lambda index: "5",
        is_slice=lambda index: True,
    )
    narrow: dict[str, Any] = {"pcie": (5, 8)}
    devices = (gpu(**BUSY), gpu(**BUSY, **narrow))
    inventory = NvmlInventory(driver="600", cuda_version=None, devices=devices)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5")
    monkeypatch.setattr(accelerator, "current", device)
    monkeypatch.setattr(hardware, "nvml_inventory", lambda: inventory)

    assert plain(check_nvml(Job())) == [
        (
            Verdict.OK,
            "GPU 0 H100: read by NVML; the job uses MIG slices, so memory in use is not judged",
        ),
        (Verdict.WARNING, "GPU 1 H100: PCIe uses 8 lanes of 16"),
    ]


@pytest.mark.parametrize(
    ("program", "files", "is_built", "answers"),
    [
        ("import time; time.sleep(600)", ["driver"], True, False),
        ("", ["driver"], True, True),
        ("raise SystemExit(1)", ["driver"], True, True),
        ("import time; time.sleep(600)", [], True, True),  # not asked
        ("import time; time.sleep(600)", ["driver"], False, True),
    ],
    ids=["hangs", "answers", "refuses", "no driver", "no torch for it"],
)
def test_a_driver_answers_if_a_process_that_uses_it_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    files: list[str],
    is_built: bool,
    answers: bool,
) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(accelerator, "current", SimpleNamespace(is_built=lambda: is_built))
    monkeypatch.setattr(hardware, "_DRIVER_FILES", (tmp_path / "driver",))
    monkeypatch.setattr(hardware, "_ASK_DRIVER", program)
    monkeypatch.setattr(hardware, "DRIVER_SECONDS", 60 if answers else 0.1)

    assert hardware.driver_answers() == answers


def test_the_process_that_asks_the_driver_ends_without_an_error() -> None:
    subprocess.run([sys.executable, "-c", hardware._ASK_DRIVER], check=True)


@pytest.mark.parametrize(
    ("value", "unknown"),
    [
        ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", ""),
        (
            "max_split_size_mb:64,roundup_power2_divisions:[256:1, 512:2],backends:native",
            "backends",
        ),
    ],
)
def test_a_list_within_an_allocator_setting_holds_no_options(
    monkeypatch: pytest.MonkeyPatch, value: str, unknown: str
) -> None:
    for name in hardware._ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
    monkeypatch.setattr(accelerator, "current", SimpleNamespace(is_available=lambda: False))

    found = [text for verdict, text in plain(check_allocator(Job())) if verdict != Verdict.OK]

    assert len(found) == bool(unknown)
    assert not found or f"{unknown!r}" in found[0]


@pytest.mark.parametrize(
    ("gpus", "value", "verdict", "text"),
    [
        (FakeGpus(), None, Verdict.OK, "expandable segments are on, which avoids most frag"),
        (
            FakeGpus(segments=False),
            None,
            Verdict.WARNING,
            "expandable segments are off (PYTORCH_CUDA_ALLOC_CONF is not set): fragmentation",
        ),
        (
            FakeGpus(segments=False),
            "max_split_size_mb:128",
            Verdict.WARNING,
            "expandable segments are off (PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128): frag",
        ),
        (
            None,
            "max_split_size_mb:128",
            Verdict.OK,
            "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128: valid",
        ),
        (None, None, Verdict.NOT_APPLICABLE, "torch's allocator of GPU memory: no GPU"),
    ],
)
def test_expandable_segments_are_advised_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    gpus: FakeGpus | None,
    value: str | None,
    verdict: Verdict,
    text: str,
) -> None:
    for name in list(os.environ):
        if name.startswith("PYTORCH_"):
            monkeypatch.delenv(name)
    if value is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
    current = gpus or SimpleNamespace(is_available=lambda: False)
    monkeypatch.setattr(accelerator, "current", current)

    [finding] = check_allocator(Job())

    assert finding.verdict == verdict
    assert finding.text.startswith(text)


def test_each_rank_measures_its_own_gpu_against_its_peaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = FakeGpus()
    monkeypatch.setattr(accelerator, "current", gpus)
    monkeypatch.setattr(hardware, "_gpu_matmul", lambda index, number_type: 4e14 + index)
    monkeypatch.setattr(hardware, "_gpu_copy", lambda index: 2e12)
    monkeypatch.setattr(hardware, "gpu_peak_flops_per_second", lambda name: 1e15)
    inventory = NvmlInventory(driver="", cuda_version=None, devices=(gpu(uuid="GPU-0"), gpu()))
    monkeypatch.setattr(hardware, "nvml_inventory", lambda: inventory)

    product, copy = check_speed(Job(local_rank=3))

    assert product.text.startswith("cuda:1 H100-1: bf16 product of 8192 x 8192: 400 TFLOP/s, 40%")
    assert (product.verdict, product.figures) == (
        Verdict.WARNING,
        {"flops_per_second": 4e14 + 1},
    )
    assert copy == Finding(
        verdict=Verdict.OK,
        text="cuda:1 H100-1: copy within the device: 2 TB/s, 67% of the peak 3 TB/s",
        figures={"bytes_per_second": 2e12},
    )
    assert gpus.is_cache_empty


@pytest.mark.parametrize(
    ("bf16", "dtype", "name"),
    [((1,), torch.bfloat16, "bf16"), ((0,), torch.float16, "fp16")],
)
def test_the_product_is_of_the_type_for_which_the_gpu_has_tensor_cores(
    monkeypatch: pytest.MonkeyPatch, bf16: tuple[int, ...], dtype: torch.dtype, name: str
) -> None:
    results: list[torch.Tensor] = []

    def seconds(index: int, work: Callable[[], torch.Tensor]) -> float:
        results.append(work())
        return 1.0

    monkeypatch.setattr(accelerator, "current", FakeGpus(bf16=bf16))
    monkeypatch.setattr(hardware, "_torch_device", lambda index: "cpu")
    monkeypatch.setattr(hardware, "_gpu_seconds", seconds)
    monkeypatch.setattr(hardware, "_MATMUL_SIDE", 2)
    monkeypatch.setattr(hardware, "_COPY_BYTES", 2)
    monkeypatch.setattr(hardware, "nvml_inventory", lambda: None)

    product, _ = check_speed(Job(local_rank=1))

    assert product.text.startswith(f"cuda:1 H100-1: {name} product of 2 x 2: ")
    assert results[0].dtype == dtype


def test_a_cpu_whose_threads_wait_for_each_other_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accelerator, "current", SimpleNamespace(is_available=lambda: False))
    rates = [None, 5e10]
    monkeypatch.setattr(hardware, "measure_cpu_flops_per_second", lambda: rates.pop(0))
    monkeypatch.setattr(hardware, "_CPU_COPY_BYTES", 2**20)

    slow, copied = check_speed(Job())
    usual, _ = check_speed(Job())

    assert slow.verdict == Verdict.WARNING and "below 8 GFLOP/s per thread" in slow.text
    assert usual.text.endswith("fp32 product: 50 GFLOP/s")
    assert usual.figures == {"flops_per_second": 5e10}
    assert copied.text.startswith("CPU: copy of 1 MiB: ")
