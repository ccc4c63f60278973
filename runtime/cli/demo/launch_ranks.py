"""Starts the ranks of the demo on this machine, and prepares their environment and DeepSpeed."""

from __future__ import annotations

import logging
import os
import sys
import warnings

from ....errors import CommandLineError
from ....metrics.settings import load_settings
from ...devices.cpu import usable_cores
from ..run_command import refuse_namesake


def launch_demo(steps: int, num_processes: int | None, stage: int) -> int:
    """Train the demo with torchrun's agent in this process, and pass its output through.

    Args:
        steps: Optimizer steps, at least 1.
        num_processes: Number of ranks; None for one per GPU, or 2 without GPUs.
        stage: ZeRO stage, 0 to 3.

    Returns:
        0, or the exit code of the first rank that failed (128 + n if signal n ended it).

    Raises:
        CommandLineError: There are fewer GPUs than processes, monitoring is disabled, or the ranks
            would import another zerowatch.
        SettingsError: A setting is invalid.
    """
    _check_enabled()
    refuse_namesake("demo")
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from ...common import accelerator

    num_gpus = accelerator.current.device_count()
    if num_gpus and num_processes and num_processes > num_gpus:
        raise CommandLineError(
            f"demo: --nproc {num_processes}, but this machine has {num_gpus} GPU(s), one per "
            "process; give a smaller number, or train on the CPU with CUDA_VISIBLE_DEVICES="
        )
    ranks = num_processes or num_gpus or 2
    _set_environment(ranks, on_gpu=num_gpus > 0)
    _print_title(steps, ranks, stage, device="GPU" if num_gpus else "CPU")
    agent = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    job = ["-m", "zerowatch.runtime.cli.demo.job", f"--steps={steps}", f"--stage={stage}"]
    try:
        torchrun.main([*agent, *job])
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
        return 128 - status if status < 0 else status
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _check_enabled() -> None:
    if not load_settings().enabled:
        raise CommandLineError(
            "demo: monitoring is disabled, but the demo shows monitoring; unset "
            "ZEROWATCH_ENABLED, or set enabled = true in zerowatch.toml"
        )


def _print_title(steps: int, ranks: int, stage: int, *, device: str) -> None:
    processes = f"{ranks} process" if ranks == 1 else f"{ranks} processes"
    sys.stdout.write(
        "zerowatch demo: a small byte-level GPT learns the source text of Python's standard "
        f"library\nZeRO-{stage}, {processes} on {device}, {steps} steps; starting ...\n"
    )
    sys.stdout.flush()


def _set_environment(ranks: int, *, on_gpu: bool) -> None:
    """Set the ranks' environment; variables of the user take precedence."""
    threads = max(1, int(usable_cores()) // ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if not on_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if sys.platform == "linux":
        # All ranks are on this machine: gloo need not resolve its name, nor listen to others.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def quiet_deepspeed() -> None:
    """Silence DeepSpeed's logs and avoid its compilations; call before the process group exists."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # The console prints the same information.
    for name in ("run_info", "final_report"):
        logging.getLogger(f"zerowatch.runtime.monitor.{name}").setLevel(logging.WARNING)
    # DeepSpeed calls all_gather_into_tensor, which torch 2.13 deprecates.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # On CPU DeepSpeed compiles a shared-memory all-reduce that only inference uses: half a minute
    # at the first start, and an error without a C++ compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
