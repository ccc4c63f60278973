"""Tests of the checks of software whose versions, locks and variables are given.

Real packages and locks are in `test_planted_faults_are_named.py`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zerowatch.runtime.cli.check import software
from zerowatch.runtime.cli.check.software import (
    check_builds,
    check_compiler,
    check_environment,
    check_nvcc,
)
from zerowatch.runtime.cli.check.verdicts import Job, Verdict
from zerowatch.runtime.common import accelerator
from zerowatch.runtime.common.extension_locks import BuildLock


@pytest.mark.parametrize(
    ("release", "cuda", "verdict"),
    [
        ("12.8", "12.8", Verdict.OK),
        ("12.1", "12.8", Verdict.OK),
        ("11.8", "11.2", Verdict.OK),
        ("11.8", "12.8", Verdict.FAILED),
        ("13.1", "13.0", Verdict.FAILED),
        ("13.0", "13.0.1", Verdict.OK),
        (None, "12.8", Verdict.WARNING),
    ],
)
def test_nvcc_fits_within_cuda_11_and_12_and_else_exactly(
    monkeypatch: pytest.MonkeyPatch, release: str | None, cuda: str, verdict: Verdict
) -> None:
    monkeypatch.delenv("DS_SKIP_CUDA_CHECK", raising=False)

    assert check_nvcc(release, cuda, "/usr/local/cuda").verdict == verdict


def test_the_advice_on_nvcc_names_the_version_that_torch_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DS_SKIP_CUDA_CHECK", raising=False)
    finding = check_nvcc("13.1", "13.0.2", "/cuda")
    monkeypatch.setenv("DS_SKIP_CUDA_CHECK", "1")
    skipped = check_nvcc("13.1", "13.0.2", "/cuda")

    assert finding.text == (
        "nvcc 13.1 in /cuda, but torch was built for CUDA 13.0.2: DeepSpeed refuses to compile its "
        "operations"
    )
    assert finding.advice == "set CUDA_HOME to a CUDA toolkit 13.0"
    assert skipped.verdict == Verdict.OK


@pytest.mark.parametrize(
    ("built_for", "built", "needs_compiler"),
    [
        ("cpu", ("cpu_adam", "fused_adam", "deepspeed_shm_comm"), False),
        ("cpu", ("cpu_adam", "fused_adam"), True),
        ("cuda", ("cpu_adam", "fused_adam", "deepspeed_shm_comm"), True),
        ("", (), True),
    ],
)
def test_installed_optimizers_need_no_compiler(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    built_for: str,
    built: tuple[str, ...],
    needs_compiler: bool,
) -> None:
    import deepspeed.git_version_info

    installed = dict.fromkeys(built, True)
    monkeypatch.setattr(deepspeed.git_version_info, "accelerator_name", built_for)
    monkeypatch.setattr(deepspeed.git_version_info, "installed_ops", installed)
    torch_info = {"version": ".".join(torch.__version__.split(".")[:2])}
    monkeypatch.setattr(deepspeed.git_version_info, "torch_info", torch_info)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)

    [finding] = check_compiler(Job())

    assert finding.verdict == (Verdict.FAILED if needs_compiler else Verdict.OK)
    assert ("g++" in finding.text) == needs_compiler


@pytest.mark.parametrize(
    ("accelerator_name", "built", "built_with", "named"),
    [
        ("cpu", ("cpu_adam", "fused_adam", "deepspeed_shm_comm"), ("2.1", "0.0"), "version=2.1"),
        ("cpu", ("fused_adam",), ("2.1", "0.0"), "version=2.1"),
        ("cuda", ("cpu_adam", "fused_adam"), ("2.13", "11.8"), "CUDA version=11.8"),
        ("cuda", ("cpu_adam", "fused_adam"), ("2.13", "12.8"), None),
    ],
)
def test_installed_operations_that_deepspeed_refuses_are_named(
    monkeypatch: pytest.MonkeyPatch,
    accelerator_name: str,
    built: tuple[str, ...],
    built_with: tuple[str, str],
    named: str | None,
) -> None:
    import deepspeed.accelerator
    import deepspeed.git_version_info

    version, cuda = built_with
    values = {
        "accelerator_name": accelerator_name,
        "installed_ops": dict.fromkeys(built, True),
        "torch_info": {"version": version, "cuda_version": cuda},
    }
    for name, value in values.items():
        monkeypatch.setattr(deepspeed.git_version_info, name, value)
    device = SimpleNamespace(device_name=lambda: accelerator_name)
    monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", lambda: device)
    monkeypatch.setattr(accelerator, "current", SimpleNamespace(is_available=lambda: True))
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.setattr(torch.version, "cuda", "12.8")

    [finding] = check_compiler(Job())

    if named is None:
        assert finding.verdict == Verdict.OK
    else:
        assert finding.verdict == Verdict.FAILED
        assert named in finding.text
        assert "reinstall DeepSpeed" in finding.advice


@pytest.mark.parametrize(
    ("age", "builders", "verdict", "words"),
    [
        (None, (), Verdict.OK, "has just been released"),
        (1799.0, (7, 8), Verdict.WARNING, "process 7 compiles cpu_adam since 29 min 59 s (/"),
        (1800.0, (7,), Verdict.WARNING, "30 min 0 s, which is unusually long; every job"),
        (
            59.0,
            (),
            Verdict.WARNING,
            "a build of cpu_adam has begun 0 min 59 s ago, without a compiler",
        ),
        (60.0, (), Verdict.FAILED, "every job that needs cpu_adam waits for it silently"),
    ],
)
def test_a_lock_is_judged_by_its_age_and_its_builders(
    monkeypatch: pytest.MonkeyPatch,
    age: float | None,
    builders: tuple[int, ...],
    verdict: Verdict,
    words: str,
) -> None:
    lock = BuildLock(path=Path("/x/cpu_adam/lock"), age_seconds=age, builders=builders)
    monkeypatch.setattr(software, "build_locks", lambda root: [lock])

    [finding] = check_builds(Job())

    assert finding.verdict == verdict
    assert words in finding.text
    assert finding.figures == ({} if age is None else {"age_seconds": age})


@pytest.mark.parametrize(
    ("name", "value", "is_harmful"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "0", False),
        ("CUDA_LAUNCH_BLOCKING", "11", False),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", False),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", True),
        ("NCCL_BLOCKING_WAIT", "1", True),
        ("NCCL_P2P_DISABLE", "1", True),
        ("NCCL_IB_DISABLE", "1", True),
        ("NCCL_SHM_DISABLE", "1", True),
        ("NCCL_DEBUG", "TRACE", True),
        ("NCCL_DEBUG", "WARN", False),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", True),
        ("TORCH_SHOW_DISPATCH_TRACE", "1", True),
        ("PYTHONASYNCIODEBUG", "1", True),
        ("PYTHONMALLOC", "pymalloc_debug", True),
        ("PYTHONMALLOC", "pymalloc", False),
    ],
)
def test_a_variable_is_harmful_by_its_whole_value(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, is_harmful: bool
) -> None:
    for each in software._HARMFUL_VARIABLES:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)

    [finding] = check_environment(Job())

    if is_harmful:
        assert finding.text.startswith(f"{name}={value} ")
        assert finding.advice == f"unset {name}, unless you debug with it"
    else:
        assert finding.verdict == Verdict.OK
