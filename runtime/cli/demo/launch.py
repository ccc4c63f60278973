"""Starts the demo's processes on this machine, and waits for them."""

from __future__ import annotations

import os
import sys

from ....errors import CommandLineError
from ....metrics.settings import load_settings
from ...devices.cores import usable_cores


def launch_demo(steps: int, num_processes: int | None, stage: int) -> int:
    """Train the demo with torchrun's agent in this process, its output passed through.

    Args:
        steps: Optimizer steps, at least 1.
        num_processes: Ranks; None takes one per GPU, or 2 where there is no GPU.
        stage: ZeRO stage, 0 to 3.

    Returns:
        0, or the exit code of the rank that failed first (128 + n if signal n ended it).

    Raises:
        CommandLineError: There are fewer GPUs than processes asked for, or watching is off.
        SettingsError: A setting is wrong.
    """
    _refuse_unwatched()
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from ...common import accelerator

    num_gpus = accelerator.current.device_count()
    if num_gpus and num_processes and num_processes > num_gpus:
        raise CommandLineError(
            f"demo: --nproc {num_processes}, but this machine has {num_gpus} GPU(s), one per "
            "process; ask for fewer, or hide them with CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    ranks = num_processes or num_gpus or 2
    _set_environment(ranks, on_gpu=num_gpus > 0)
    _announce(steps, ranks, stage, place="GPU" if num_gpus else "CPU")
    where = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    job = ["-m", "zerowatch.runtime.cli.demo.job", f"--steps={steps}", f"--stage={stage}"]
    try:
        torchrun.main([*where, *job])
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
        return 128 - status if status < 0 else status
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _refuse_unwatched() -> None:
    if not load_settings().enabled:
        raise CommandLineError(
            "demo: watching is switched off, and the watch is what the demo shows; unset "
            "ZEROWATCH_ENABLED, or set enabled = true in zerowatch.toml"
        )


def _announce(steps: int, ranks: int, stage: int, *, place: str) -> None:
    processes = f"{ranks} process" if ranks == 1 else f"{ranks} processes"
    sys.stdout.write(
        "zerowatch demo: a small GPT learns the Python standard library's source text, byte by "
        f"byte\nZeRO-{stage}, {processes} on {place}, {steps} steps; starting ...\n"
    )
    sys.stdout.flush()


def _set_environment(ranks: int, *, on_gpu: bool) -> None:
    """Set what the ranks inherit; what the user has set stays."""
    threads = max(1, int(usable_cores()) // ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if not on_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if sys.platform == "linux":
        # The ranks are all here: gloo need not resolve the host's name, nor listen to others.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
