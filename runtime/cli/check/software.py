"""Checks of the software: versions, compiler, builds of extensions, environment variables."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from ...common import accelerator
from ...common.extension_locks import BuildLock, build_locks, extensions_root
from ...devices.nvml_inventory import NvmlInventory, nvml_inventory
from .verdicts import Finding, Job, failed, ok, skipped, warning

# A build without a compiler at work may have one that is about to start.
_STARTING_SECONDS = 60.0
# DeepSpeed's largest operations compile for some minutes.
_LONG_BUILD_SECONDS = 1800.0
_NVCC_SECONDS = 10.0

# Variables that slow down or break training, by the values that do so: what they do, what to do.
# Values are regular expressions of the whole value.
_HARMFUL_VARIABLES: Mapping[str, tuple[str, str]] = {
    "CUDA_LAUNCH_BLOCKING": ("1", "makes each kernel wait for the previous one"),
    "TORCH_DISTRIBUTED_DEBUG": ("(?i)detail", "compares the ranks before every collective"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "blocks the training thread in each wait"),
    "NCCL_BLOCKING_WAIT": ("1", "blocks the training thread in each wait"),
    "NCCL_P2P_DISABLE": ("1", "sends between the GPUs of a host through its memory"),
    "NCCL_IB_DISABLE": ("1", "uses sockets in place of InfiniBand or RoCE"),
    "NCCL_SHM_DISABLE": ("1", "sends between the processes of a host over the network"),
    "NCCL_DEBUG": ("(?i)info|trace", "writes lines for each communicator, some for each call"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (
        "1",
        "allocates each tensor by the driver, which synchronizes the device",
    ),
    "TORCH_SHOW_DISPATCH_TRACE": ("1", "prints each operation"),
    "PYTHONASYNCIODEBUG": ("1", "slows down Python"),
    "PYTHONMALLOC": ("debug|malloc_debug|pymalloc_debug", "slows down Python"),
}


def check_versions(job: Job) -> Iterator[Finding]:
    """Compare the installed packages with zerowatch's ranges, and torch with the driver."""
    import torch

    wrong = list(_unmet_requirements())
    yield from wrong
    if not wrong:
        names = ("torch", "deepspeed", "zerowatch")
        shown = ", ".join(f"{name} {version(name)}" for name in names)
        yield ok(f"{shown}, Python {platform.python_version()}: within zerowatch's ranges")
    if not job.driver_answers:
        return
    yield from check_cuda(
        torch.version.cuda, is_rocm=torch.version.hip is not None, nvml=nvml_inventory()
    )
    if torch.version.cuda and torch.distributed.is_nccl_available():
        yield ok(f"NCCL {'.'.join(map(str, accelerator.current.module.nccl.version()))}")


def _unmet_requirements() -> Iterator[Finding]:
    for line in requires("zerowatch") or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        advice = f'pip install "{requirement.name}{requirement.specifier}"'
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            yield failed(f"{requirement.name} is not installed", advice)
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            yield failed(
                f"{requirement.name} {found} is installed; zerowatch needs "
                f"{requirement.name}{requirement.specifier}",
                advice,
            )


def check_cuda(cuda: str | None, *, is_rocm: bool, nvml: NvmlInventory | None) -> Iterator[Finding]:
    """Compare torch's CUDA with the driver.

    Args:
        cuda: The version of CUDA that torch was built for; None without CUDA.
        is_rocm: Whether torch was built for ROCm.
        nvml: The driver and its GPUs; None without a driver.
    """
    if is_rocm:
        yield skipped("CUDA: torch was built for ROCm")
    elif cuda is None and nvml is not None and nvml.devices:
        yield failed(
            f"this host has {len(nvml.devices)} GPU(s), such as {nvml.devices[0].name}, but torch "
            "was built without CUDA",
            "install a torch with CUDA: https://pytorch.org/get-started/locally",
        )
    elif cuda is None:
        yield skipped("CUDA: torch was built without it, and NVML finds no GPU")
    elif nvml is None:
        yield warning(
            f"torch was built for CUDA {cuda}, but there is no NVIDIA driver (NVML)",
            "install the driver; in a container start it with --gpus all; to train on the CPU "
            "ignore this",
        )
    # Within a major version, a driver runs programs of later CUDA versions (NVIDIA, "CUDA
    # Compatibility", minor version compatibility).
    elif nvml.cuda_version is not None and int(cuda.split(".")[0]) > nvml.cuda_version[0]:
        supported = ".".join(map(str, nvml.cuda_version))
        yield failed(
            f"torch was built for CUDA {cuda}; the driver {nvml.driver} supports CUDA {supported}",
            f"update the driver, or install a torch for CUDA {nvml.cuda_version[0]}",
        )
    else:
        yield ok(f"CUDA {cuda} of torch, driver {nvml.driver}")


def check_compiler(job: Job) -> Iterator[Finding]:
    """Find what compiles DeepSpeed's operations on first use, such as its default Adam."""
    import torch

    needed, installed = _installed_operations()
    if installed and (fault := _version_fault()):
        yield failed(
            f"DeepSpeed refuses the operations that were built when it was installed: {fault}",
            "reinstall DeepSpeed (pip install --force-reinstall --no-cache-dir --no-deps deepspeed "
            "with the same DS_BUILD_* variables), or install the torch that it was built with",
        )
        return
    if installed == needed:
        yield ok("DeepSpeed's optimizers were built when it was installed: no compiler is needed")
        return
    programs = {"g++": os.environ.get("CXX", "g++"), "ninja": "ninja"}
    missing = [name for name, program in programs.items() if shutil.which(program) is None]
    if "ninja" in missing and importlib.util.find_spec("ninja"):
        missing.remove("ninja")  # the package, which torch finds without PATH
    if missing:
        yield failed(
            f"{' and '.join(missing)} not found: DeepSpeed compiles its optimizers on first use",
            "install them (apt-get install g++; pip install ninja), or build DeepSpeed's "
            "operations in advance (DS_BUILD_OPS=1 pip install deepspeed)",
        )
    if torch.version.cuda is None or not accelerator.current.is_available():
        if not missing:
            yield ok("g++ and ninja: DeepSpeed's operations can be compiled")
        return
    from torch.utils.cpp_extension import CUDA_HOME

    yield check_nvcc(_nvcc_release(CUDA_HOME), torch.version.cuda, CUDA_HOME)


def _installed_operations() -> tuple[list[str], list[str]]:
    """Return the operations of most jobs, and those that DeepSpeed does not compile for them."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, installed_ops

    chosen = str(get_accelerator().device_name())
    needed = ["fused_adam", "cpu_adam"] + ["deepspeed_shm_comm"] * (chosen == "cpu")
    fits = accelerator_name == chosen
    return needed, [name for name in needed if fits and installed_ops.get(name)]


def _version_fault() -> str | None:
    """Return why DeepSpeed refuses to load installed operations, or None if it loads them."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import torch_info
    from deepspeed.ops.op_builder.builder import OpBuilder

    try:
        OpBuilder.validate_torch_version(torch_info)
        if get_accelerator().device_name() == "cuda" and accelerator.current.is_available():
            OpBuilder.validate_torch_op_version(torch_info)
    except RuntimeError as error:
        return str(error)
    return None


def _nvcc_release(cuda_home: str | None) -> str | None:
    """Return the version of nvcc, such as "12.8", or None without nvcc."""
    if cuda_home is None:
        return None
    try:
        answer = subprocess.run(
            [Path(cuda_home, "bin", "nvcc"), "-V"],
            capture_output=True,
            text=True,
            timeout=_NVCC_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release (\d+\.\d+)", answer.stdout)
    return found[1] if found else None


def check_nvcc(release: str | None, cuda: str, cuda_home: str | None) -> Finding:
    """Compare nvcc with torch's CUDA, as DeepSpeed does before it compiles.

    Args:
        release: nvcc's version; None without nvcc.
        cuda: The version of CUDA that torch was built for.
        cuda_home: The folder of the CUDA toolkit that torch has found.
    """
    if release is None:
        return warning(
            f"no nvcc (CUDA_HOME={cuda_home}): DeepSpeed cannot compile CUDA operations, such as "
            "its default Adam",
            f"install the CUDA toolkit {cuda} and set CUDA_HOME, or use torch's optimizer "
            "(torch_adam: true in the optimizer's params)",
        )
    wanted = ".".join(cuda.split(".")[:2])
    # DeepSpeed accepts other minor versions of CUDA 11 and 12, and all with DS_SKIP_CUDA_CHECK=1.
    accepts = release.split(".")[0] == wanted.split(".")[0] in ("11", "12")
    if release == wanted or accepts or os.environ.get("DS_SKIP_CUDA_CHECK") == "1":
        return ok(f"nvcc {release} fits torch's CUDA {cuda}")
    return failed(
        f"nvcc {release} in {cuda_home}, but torch was built for CUDA {cuda}: DeepSpeed refuses to "
        "compile its operations",
        f"set CUDA_HOME to a CUDA toolkit {wanted}",
    )


def check_builds(job: Job) -> Iterator[Finding]:
    """Name the locks of torch's extensions: a job that needs the extension waits for them."""
    root = extensions_root()
    locks = build_locks(root)
    for lock in locks:
        yield _about_lock(lock)
    if not locks:
        yield ok(f"no build of a torch extension is running or was killed ({root})")


def _about_lock(lock: BuildLock) -> Finding:
    if lock.age_seconds is None:
        return ok(f"the lock {lock.path} has just been released")
    name, age = lock.path.parent.name, {"age_seconds": lock.age_seconds}
    if lock.builders and lock.age_seconds < _LONG_BUILD_SECONDS:
        return warning(
            f"process {lock.builders[0]} compiles {name} since {lock.age} ({lock.path})",
            "wait for it; a job that needs it waits too",
            **age,
        )
    if lock.builders:
        return warning(
            f"process {lock.builders[0]} compiles {name} since {lock.age}, which is unusually "
            f"long; every job that needs it waits ({lock.path})",
            f"look at the process (ps -fp {lock.builders[0]}); if it is stuck, end it and remove "
            f"the lock: rm {lock.path}",
            **age,
        )
    if lock.age_seconds < _STARTING_SECONDS:
        return warning(
            f"a build of {name} has begun {lock.age} ago, without a compiler yet ({lock.path})",
            "run the check again in a minute",
            **age,
        )
    return failed(
        f"stale lock {lock.path}, {lock.age} old: every job that needs {name} waits for it "
        "silently and forever; no process of this machine compiles there",
        f"if no job of another machine compiles there: rm {lock.path}",
        **age,
    )


def check_environment(job: Job) -> Iterator[Finding]:
    """Name environment variables that slow down or break training, and invalid settings."""
    if job.settings_error is not None:
        yield failed(job.settings_error, "correct the setting; a run refuses it too")
    harmful = [
        (name, os.environ[name], effect)
        for name, (pattern, effect) in _HARMFUL_VARIABLES.items()
        if re.fullmatch(pattern, os.environ.get(name, ""))
    ]
    for name, value, effect in harmful:
        yield warning(f"{name}={value} {effect}", f"unset {name}, unless you debug with it")
    if not harmful and job.settings_error is None:
        yield ok("zerowatch's settings are valid; no variable is set that slows down training")
