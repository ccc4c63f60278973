"""Forks ranks from a process that has imported torch and DeepSpeed already.

It reads one line of JSON for each rank: its command, folder and environment. It writes the process
id of the rank, and the exit code once the rank has ended. It ends at the end of its input.
`forked_ranks.py` has one server for each rank, so that ranks have different hash seeds and order
sets differently, as ranks do that are started by themselves.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

# DeepSpeed's autotuner imports mlflow where it is installed, and with it OpenTelemetry's SDK.
sys.modules["mlflow"] = None  # type: ignore[assignment]
import cpuinfo  # noqa: E402
import deepspeed  # noqa: E402, F401
import optimizers  # noqa: E402 - beside this file
import torch._dynamo  # noqa: E402, F401 - likewise: the first optimizer would
from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: E402, F401 - and the first engine this

import zerowatch  # noqa: E402, F401

del sys.modules["mlflow"]  # examples use it

# What an engine, a watch and a TrainingRun import when they start.
IMPORTS = (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "zerowatch.runtime.monitor.build_watch",
    "zerowatch.runtime.training_run",
    "zerowatch.runtime.tuner.knobs.read_only_knobs",
)
# A rank that gets it prints the stacks of its threads: `forked_ranks.py` sends it before a kill.
STACKS_SIGNAL = signal.SIGUSR2
MMAP_THRESHOLD, M_MMAP_THRESHOLD = "MALLOC_MMAP_THRESHOLD_", -3  # its name in glibc's malloc.h


def prepare() -> None:
    """Do once what each rank would do again: import, load DeepSpeed's optimizers, age the imports.

    The imports are 300 modules and take more than a second. To load an optimizer DeepSpeed asks
    twice for a description of the processor, which takes a second of CPU. A full exit takes 1.3 s,
    or 0.3 s if the collector leaves the imports alone.
    """
    cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)
    for name in IMPORTS:
        with suppress(ImportError):  # another version of DeepSpeed
            importlib.import_module(name)
    for name in optimizers.BUILDERS:
        with suppress(Exception):  # no compiler: a rank that needs it fails with the reason
            optimizers.load(name)
    gc.collect()
    gc.freeze()


def serve() -> dict[str, Any] | None:
    """Fork a rank for each line of stdin; return its command in the child, None at the end."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            rank: dict[str, Any] = json.loads(line)
            return rank
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def become(rank: dict[str, Any]) -> None:
    """Set up this process as `python COMMAND` would, and run the script."""
    files = {0: (os.devnull, os.O_RDONLY)}
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        files[descriptor] = (rank[stream], os.O_WRONLY | os.O_CREAT)
    for descriptor, (path, flags) in files.items():
        opened = os.open(path, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    faulthandler.register(STACKS_SIGNAL)
    os.chdir(rank["cwd"])
    os.environ.clear()
    os.environ.update(rank["environment"])
    if MMAP_THRESHOLD in os.environ:  # the C library has read its environment by now
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, int(os.environ[MMAP_THRESHOLD]))
    name_coverage_context()
    command = rank["command"]
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = rank["cwd"]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = command
    script = Path(sys.argv[0])
    sys.path[0] = str(script.parent)
    module = ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"] = module
    exec(compile(script.read_bytes(), script, "exec"), module.__dict__)
    # Rank 0 hosts the store: it stays a little longer, as the others' last reports need it.
    if os.environ["RANK"] != "0" or os.environ["WORLD_SIZE"] == "1":
        leave()


def leave() -> None:
    """End as an interpreter does, but leave the imports to the kernel: freeing them takes 0.4 s.

    What runs by `-m` ends in full, as tests of a job's end need.
    """
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def name_coverage_context() -> None:
    """Attribute what is executed from now on to this rank's test, where coverage is measured."""
    coverage = sys.modules.get("coverage")
    if coverage is not None and (current := coverage.Coverage.current()) is not None:
        current.switch_context(os.environ.get("PYTEST_CURRENT_TEST", ""))


if __name__ == "__main__":
    prepare()
    own = serve()
    if own is not None:
        become(own)
